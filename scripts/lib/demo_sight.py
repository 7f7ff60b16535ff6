"""Real questions for scripts/demo, with their right answers: pictures drawn on the spot, things put on photographs, and
a long text with a number hidden in it."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table

from scripts.lib.accuracy.questions import png, recall_questions, sight_questions
from scripts.lib.miniature.sight.drawing import Ground, Thing, draw_thing
from scripts.lib.miniature.sight.scenes import Scene, ask_things
from scripts.lib.miniature.sight.words import SHAPES

SEED = 8
_LONGEST = 320
LEAST_RIGHT = 0.75
"""Less is a fault of the path, not of the model: its card says that it is right far more often."""


@dataclass(frozen=True)
class Asked:
    """what: the picture, in words. body: of the request."""

    what: str
    question: str
    answer: str
    body: dict[str, Any]


def _asked(what: str, images: Sequence[bytes], question: str, answer: str) -> Asked:
    urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": question})
    return Asked(
        what, question, answer, {"messages": [{"role": "user", "content": parts}], "max_tokens": 16, "temperature": 0}
    )


def drawn(folder: Path, count: int) -> list[Asked]:
    """Pictures that no training draws. folder: of the model."""
    found = []
    for q in sight_questions(folder, count, SEED):
        sizes = [Image.open(io.BytesIO(image)).size for image in q.images]
        what = "drawn, " + " and ".join(f"{w}x{h}" for w, h in sizes)
        found.append(_asked(what, q.images, q.text, q.answer))
    return found


def on_photographs(photographs: Sequence[Path]) -> list[Asked]:
    """Two or three shapes on each photograph, and a question about one of them."""
    found = []
    for number, path in enumerate(photographs):
        rng = np.random.default_rng([SEED, number])
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        image.thumbnail((_LONGEST, _LONGEST))
        while True:
            scene = _with_things(rng, image.copy())
            asked = ask_things(rng, scene, str(rng.choice(["colour", "shape", "where"])))
            if asked:
                break
        what = f"{path.stem.split('_')[0]}, {image.width}x{image.height}"
        found.append(_asked(what, [png(scene.image)], asked.text, asked.answer))
    return found


def _with_things(rng: np.random.Generator, image: Image.Image) -> Scene:
    scene, ground = Scene(image), Ground(image)
    least, wanted = min(image.size), int(rng.integers(2, 4))
    for shape in rng.permutation(SHAPES)[:6]:
        radius = float(rng.uniform(0.14, 0.2) * least)
        x, y = (float(rng.uniform(radius, side - radius)) for side in image.size)
        apart = all((x - t.x) ** 2 + (y - t.y) ** 2 > (1.3 * (radius + t.radius)) ** 2 for t in scene.things)
        clear = ground.clear_colours(x, y, radius, radius)
        if apart and clear and len(scene.things) < wanted:
            scene.things.append(Thing(str(shape), clear[int(rng.integers(len(clear)))], x, y, radius))
            draw_thing(rng, image, scene.things[-1])
    return scene


def show(console: Console, asked: Sequence[Asked], replies: Sequence[Any]) -> None:
    """A row a request. replies: scripts.lib.demo.Reply, in order."""
    table = Table(title=f"{len(asked)} chat requests at once about drawn pictures and photographs")
    for name, justify in (
        ("picture", "left"),
        ("question", "left"),
        ("answer", "left"),
        ("", "left"),
        ("TTFT ms", "right"),
    ):
        table.add_column(name, justify=justify)
    for one, r in zip(asked, replies, strict=True):
        verdict = "[green]right[/green]" if r.text.strip() == one.answer else f"[red]wrong: {one.answer}[/red]"
        table.add_row(
            one.what,
            one.question,
            r.error or r.text.strip(),
            "[red]failed[/red]" if r.error else verdict,
            "-" if r.ttft is None else f"{r.ttft * 1000:.0f}",
        )
    console.print(table)


def hidden_number(folder: Path, tokens: int) -> tuple[list[int], str]:
    """(prompt, answer): a text of about so many tokens that asks for a number which it told once."""
    question = recall_questions(folder, 1, SEED, (tokens,))[0]
    return list(question.ids), question.answer
