"""Pictures and questions as the arrays of a batch.

Several questions about the same pictures share one row of tokens: the pictures come once, and each question sees them
and itself. To the model it is what the server makes of each question alone, at a fraction of the work.

    index     0 ...                             |              |              |
    tokens    <|im_start|> user, pictures       | question 0   | question 1   | padding
    segment   0                                 | 1            | 2            | -1
    position  0 ... cursor (M-RoPE)             | cursor + ... | cursor + ... | 0

Rows of several turns give all their turns segment 1 and go on counting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import tokenizers
from PIL import Image

from scripts.lib.miniature.sight.layout import Layout, VisionPlan
from scripts.lib.miniature.sight.scenes import Question
from scripts.lib.miniature.spec import Batch
from serving.positions import mrope_positions
from vitbatch.images.patches import patchify


@dataclass(frozen=True)
class Row:
    """One row of a batch. chained: the questions are turns of one conversation. text_first: the (only) question stands
    before the pictures."""

    images: Sequence[Image.Image]
    questions: Sequence[Question]
    tasks: Sequence[int]
    chained: bool = False
    text_first: bool = False


class Tokens:
    """The few strings of the chat template as token ids, and plain text."""

    def __init__(self, definition: str):
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        self.plain = cache(self._plain)
        ids = self._tokenizer.token_to_id
        self.image = ids("<|image_pad|>")
        self.user = [ids("<|im_start|>"), *self._plain(" user\n")]
        self.assistant = [ids("<|im_end|>"), ids("<|im_start|>"), *self._plain(" assistant\n")]
        self.open, self.close, self.end = ids("<|vision_start|>"), ids("<|vision_end|>"), ids("<|im_end|>")

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class Packer:
    """Fills the arrays of one layout, row by row."""

    def __init__(self, layout: Layout, plan: VisionPlan, tokens: Tokens):
        self._layout, self._plan, self._tokens = layout, plan, tokens
        self.batch: Batch = {name: np.zeros(s.shape, s.dtype) for name, s in layout.shapes(plan.features).items()}
        for name in ("segment", "rows", "targets", "task"):
            self.batch[name][...] = -1
        self._filled = 0

    def add(self, row: Row) -> None:
        layout, batch, t, b = self._layout, self.batch, self._tokens, self._filled
        grids = [self._add_image(b * layout.images + i, image) for i, image in enumerate(row.images)]
        head = list(t.user)
        if row.text_first:
            head += t.plain(row.questions[0].text)
        spans = []
        for i, (gh, gw) in enumerate(grids):
            count = gh * gw // 4
            start = len(head) + 1
            spans.append((start, (1, gh, gw)))
            head += [t.open, *[t.image] * count, t.close]
            batch["rows"][b, start : start + count] = i * layout.patches // 4 + np.arange(count)
        at = len(head)
        positions, _ = mrope_positions(at + 1, spans, self._plan.merge)
        batch["ids"][b, :at], batch["segment"][b, :at] = head, 0
        batch["positions"][b, :, :at] = positions[:, :at]
        cursor = int(positions[0, at])

        answers = 0
        for number, (question, task) in enumerate(zip(row.questions, row.tasks, strict=True)):
            asked = [] if row.text_first else t.plain(question.text)
            if row.chained and number:
                asked = [*t.user, *asked]
            answer = [*t.plain(question.answer), t.end]
            ids = [*asked, *t.assistant, *answer]
            if at + len(ids) > layout.tokens or answers + len(answer) > layout.answers:
                break
            batch["ids"][b, at : at + len(ids)] = ids
            batch["segment"][b, at : at + len(ids)] = 1 if row.chained else 1 + number
            batch["positions"][b, :, at : at + len(ids)] = cursor + np.arange(len(ids))
            first = at + len(ids) - len(answer) - 1
            own = slice(answers, answers + len(answer))
            batch["at"][b, own] = first + np.arange(len(answer))
            batch["targets"][b, own], batch["slot"][b, own] = answer, number
            batch["task"][b, number] = task
            at, answers = at + len(ids), answers + len(answer)
            if row.chained:
                cursor += len(ids)
        self._filled += 1

    def _add_image(self, index: int, image: Image.Image) -> tuple[int, int]:
        """Grid of patches of the image at `index`, prepared as the server prepares it."""
        plan, batch = self._plan, self.batch
        height, width = plan.canvas(image.height, image.width)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        rows = patchify(np.asarray(image), plan.patch, plan.merge)
        gh, gw = height // plan.patch, width // plan.patch
        places, tap_index, tap_weight = plan.grid(gh, gw)
        batch["pixels"][index, : len(rows)] = rows
        batch["places"][index, : len(rows)] = places
        batch["tap_index"][index, : len(rows)] = tap_index
        batch["tap_weight"][index, : len(rows)] = tap_weight
        batch["count"][index] = len(rows)
        return gh, gw
