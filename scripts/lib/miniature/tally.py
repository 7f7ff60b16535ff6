"""Counts of right answers by task."""

from collections.abc import Mapping, Sequence

import numpy as np

from scripts.lib.miniature.spec import Scores


class Tally:
    """right, asked: int [tasks]. losses: of the batches counted. extra: sums of the scores' further scalars."""

    def __init__(self, tasks: Sequence[str]):
        self.tasks = tuple(tasks)
        self.right = np.zeros(len(tasks), np.int64)
        self.asked = np.zeros(len(tasks), np.int64)
        self.losses: list[float] = []
        self.extra: dict[str, float] = {}

    def add(self, scores: Scores) -> None:
        """Waits for the scores."""
        task, correct = np.asarray(scores.task).ravel(), np.asarray(scores.correct).ravel()
        asked = task >= 0
        self.asked += np.bincount(task[asked], minlength=len(self.tasks))
        self.right += np.bincount(task[asked & correct], minlength=len(self.tasks))
        self.losses.append(float(scores.loss))
        for name, value in scores.extra.items():
            self.extra[name] = self.extra.get(name, 0.0) + float(value)

    @property
    def loss(self) -> float:
        """The mean over the batches."""
        return float(np.mean(self.losses)) if self.losses else float("nan")

    def counts(self) -> dict[str, tuple[int, int]]:
        """(right, asked) of every task that was asked."""
        pairs = zip(self.tasks, self.right.tolist(), self.asked.tolist(), strict=True)
        return {task: (right, asked) for task, right, asked in pairs if asked}

    def accuracy(self) -> dict[str, float]:
        return {task: right / asked for task, (right, asked) in self.counts().items()}

    def extras(self) -> dict[str, float]:
        """The further scalars, averaged over the batches."""
        return {name: total / len(self.losses) for name, total in self.extra.items()}


def as_text(values: Mapping[str, float]) -> str:
    return " ".join(f"{task} {100 * value:.1f}" for task, value in values.items())
