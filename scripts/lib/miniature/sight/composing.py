"""Chooses what a row of a batch shows and asks."""

import math
from dataclasses import replace

import numpy as np

from scripts.lib.miniature.sight.layout import Layout, VisionPlan
from scripts.lib.miniature.sight.packing import Row
from scripts.lib.miniature.sight.scenes import (
    Level,
    Question,
    Scene,
    ask_chart,
    ask_text,
    ask_text_place,
    ask_things,
    draw_chart,
    draw_things,
    draw_words,
    phrase,
    referents,
)
from scripts.lib.miniature.sight.words import ORDINALS, SHAPES, TASKS
from scripts.lib.miniature.spec import Job

# Tasks asked about things: of a held-out set, and while training, as often as they need practice.
_ASKED = {"colour": 0.14, "shape": 0.25, "count": 0.3, "where": 0.2, "side": 0.11}
_PRACTISED = {"colour": 0.12, "shape": 0.22, "count": 0.39, "where": 0.16, "side": 0.11}


class Composer:
    """Rows of one job."""

    def __init__(self, layout: Layout, plan: VisionPlan, job: Job):
        self._layout, self._plan, self._suite = layout, plan, job.suite
        # One thing or letter on a plain ground first: what a crowd or a word is made of is learnt from them in a few
        # hundred steps, and from crowds and words alone hardly at all.
        letters = 6 if job.suite else min(6, 1 + int(job.progress / 0.05))
        things = 6 if job.suite else min(6, 1 + int(job.progress / 0.03))
        # Several pictures come when one is understood; with one thing each, to begin with.
        self._each = 3 if job.suite else min(3, 1 + int(max(0.0, job.progress - 0.2) / 0.04))
        ease = 0.0 if job.suite else max(0.0, 1 - job.progress / 0.3)
        self._level = Level(letters=letters, things=things, held_out=job.suite is not None, ease=ease)

    def row(self, rng: np.random.Generator) -> Row:
        return self._single(rng) if self._layout.images == 1 else self._several(rng)

    def _size(self, rng: np.random.Generator) -> tuple[int, int]:
        """(width, height) of a picture whose canvas has a number of patches that the layout is for."""
        (low, high), widest = self._layout.sides, math.log(self._layout.ratio)
        least = math.log(4) if self._suite == "strips" else 0.0
        while True:
            side = math.exp(rng.uniform(math.log(low), math.log(high)))
            # Most pictures are nearly square.
            stretch = rng.uniform(0, 1) ** 2 * widest if not least else rng.uniform(least, widest)
            ratio = math.exp(stretch * (1 if rng.random() < 0.5 else -1))
            width, height = round(side * ratio**0.5), round(side / ratio**0.5)
            if not 56 <= min(width, height) <= max(width, height) <= 1024:
                continue
            if self._layout.patches // 4 < self._plan.patches(height, width) <= self._layout.patches:
                return width, height

    def _things(self, rng: np.random.Generator, level: Level | None = None, count: int | None = None) -> Scene:
        while True:
            scene = draw_things(rng, *self._size(rng), level or self._level, count)
            if scene.things:
                return scene

    def _words(self, rng: np.random.Generator) -> Scene:
        width, height = self._size(rng)
        return draw_words(rng, width, height, self._level, width / self._plan.canvas(height, width)[1])

    def _single(self, rng: np.random.Generator) -> Row:
        kind = rng.random()
        asked: list[Question | None]
        if self._suite == "crowd":
            level = Level(things=int(rng.integers(7, 10)), held_out=True, crowd=True)
            scene = self._things(rng, level)
            asked = [Question("count", phrase(rng, "count", things="objects"), str(len(scene.things)))]
        elif kind < 0.45:
            scene = self._things(rng)
            # More than there is room for: not every task has a question to every picture.
            shares = _ASKED if self._suite else _PRACTISED
            tasks = rng.choice(list(shares), 3 * self._layout.questions, p=list(shares.values()))
            asked = [ask_things(rng, scene, str(task)) for task in tasks]
        elif kind < 0.97:
            scene = self._words(rng)
            asked = [ask_text(rng, scene)]
            if rng.random() < 0.3:
                asked.append(ask_text_place(rng, scene))
            asked += [ask_things(rng, scene, str(task)) for task in rng.permutation(["colour", "shape", "where"])[:2]]
        else:
            scene = draw_chart(rng, *self._size(rng), self._level)
            asked = [ask_chart(rng, scene) for _ in range(2)]
        return self._row(rng, [scene], [question for question in asked if question])

    def _several(self, rng: np.random.Generator) -> Row:
        most = self._layout.images
        number = most if self._suite == "four" else int(rng.integers(2, most + 1))
        if rng.random() < 0.2:
            scenes = [self._words(rng) for _ in range(number)]
            asked: list[Question | None] = [self._read_one(rng, scenes) for _ in range(min(2, self._layout.questions))]
        else:
            level = replace(self._level, things=self._each)
            scenes = [self._things(rng, level) for _ in range(number)]
            asked = [self._which(rng, scenes) for _ in range(self._layout.questions - 1)]
            asked.append(self._in_one(rng, scenes))
        return self._row(rng, scenes, [question for question in asked if question])

    def _which(self, rng: np.random.Generator, scenes: list[Scene]) -> Question | None:
        shown = [
            {name for t in s.things for name in (t.shape, f"{t.colour} object", f"{t.colour} {t.shape}")}
            for s in scenes
        ]
        # Which picture is drawn first, then what: otherwise the fullest picture would be the answer most often.
        for chosen in rng.permutation(len(scenes)):
            others = set().union(*(names for i, names in enumerate(shown) if i != chosen))
            if alone := sorted(shown[chosen] - others):
                thing = alone[int(rng.integers(len(alone)))]
                two = len(scenes) == 2 and rng.random() < 0.5
                text = phrase(rng, "which of two" if two else "which", thing=thing)
                return Question("which", text, ORDINALS[chosen])
        return None

    def _in_one(self, rng: np.random.Generator, scenes: list[Scene]) -> Question | None:
        chosen = int(rng.integers(len(scenes)))
        named = referents(scenes[chosen].things)
        by_shape = rng.random() < 0.6
        names = [n for n in named if (n in SHAPES if by_shape else n.endswith(" object"))]
        if not names:
            return None
        name = names[int(rng.integers(len(names)))]
        kind, answer = ("in image", named[name].colour) if by_shape else ("shape in image", named[name].shape)
        return Question("in image", phrase(rng, kind, thing=name, nth=ORDINALS[chosen]), answer)

    def _read_one(self, rng: np.random.Generator, scenes: list[Scene]) -> Question:
        chosen = int(rng.integers(len(scenes)))
        return Question("in image", phrase(rng, "read in image", nth=ORDINALS[chosen]), scenes[chosen].text)

    def _row(self, rng: np.random.Generator, scenes: list[Scene], questions: list[Question]) -> Row:
        distinct = list({question.text: question for question in questions}.values())[: self._layout.questions]
        text_first = bool(distinct) and rng.random() < 0.06
        if text_first:
            distinct = distinct[:1]
        return Row(
            [scene.image for scene in scenes],
            distinct,
            [TASKS.index(question.task) for question in distinct],
            chained=rng.random() < 0.15,
            text_first=text_first,
        )
