"""Held-out questions with one right answer each: pictures for Sight, texts for Recall. The same for the same seed."""

import io
import json
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from scripts.lib.miniature.recall_data import TASKS, scored_row, writer
from scripts.lib.miniature.sight.composing import Composer
from scripts.lib.miniature.sight.layout import Layout, VisionPlan
from scripts.lib.miniature.spec import Job
from serving.tokenizer import Tokenizer

# Sides of the pictures, in pixels, and pictures a question.
_PICTURES = (((56, 128), 1), ((90, 300), 1), ((230, 1024), 1), ((56, 128), 3))


@dataclass(frozen=True)
class Question:
    """images: PNG files that stand before `text` in a chat. ids: tokens of a prompt without images instead."""

    task: str
    answer: str
    images: tuple[bytes, ...] = ()
    text: str = ""
    ids: tuple[int, ...] = ()


def sight_questions(folder: Path, count: int, seed: int) -> list[Question]:
    """Pictures that no training draws, of several sizes in turn, each asked one question. folder: the model's, whose
    processor decides what it sees of a picture."""

    def read(name: str):
        return json.loads((folder / name).read_text(encoding="utf-8"))

    plan = VisionPlan(read("config.json"), read("preprocessor_config.json"))
    layouts = [Layout(1, n, plan.patches(high, high), 240, sides=(low, high)) for (low, high), n in _PICTURES]
    found: list[Question] = []
    index = 0
    while len(found) < count:
        # Any name of a suite means "held out"; one that no evaluation of a training has makes other pictures.
        job = Job(seed, index, 1.0, suite="accuracy")
        row = Composer(layouts[index % len(layouts)], plan, job).row(job.generator())
        index += 1
        if row.questions and not row.text_first:
            asked = row.questions[index % len(row.questions)]
            found.append(Question(asked.task, asked.answer, tuple(map(png, row.images)), asked.text))
    return found


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def recall_questions(folder: Path, count: int, seed: int, lengths: tuple[int, ...]) -> list[Question]:
    """Texts of at most `lengths` tokens in turn with one question each; the needle anywhere, now and then the very
    first or the very last line. Raises ValueError for a model of another vocabulary."""
    w = writer()
    probe = "The grass is green. amber-fox = 48213"
    if Tokenizer.from_checkpoint(folder).encode_plain(probe) != w.encode(probe):
        raise ValueError(f"{folder} has another tokenizer than Recall's; its questions would mean nothing")
    rng, found = random.Random(f"accuracy/{seed}"), []
    while len(found) < count:
        i = len(found)
        task, length = TASKS[i % len(TASKS)], lengths[i // len(TASKS) % len(lengths)]
        row = scored_row(task, rng, length, depth=(None, 0.0, None, None, 1.0)[i % 5])
        if not any(row.answers):
            continue
        first = row.answers.index(1)
        told = [t for t, of in zip(row.ids, row.answers, strict=True) if of == 1 and t != w.end]
        text = w.tokenizer.decode(told)
        found.append(Question(f"{task} {length}", text.strip(), ids=tuple(row.ids[:first])))
    return found


def tally(questions: list[Question], answers: list[str]) -> dict[str, tuple[int, int]]:
    """(right, asked) by task."""
    counts: dict[str, tuple[int, int]] = {}
    for question, answer in zip(questions, answers, strict=True):
        right, asked = counts.get(question.task, (0, 0))
        counts[question.task] = right + (answer == question.answer), asked + 1
    return dict(sorted(counts.items()))
