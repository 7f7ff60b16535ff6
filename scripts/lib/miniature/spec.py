"""What the training loop asks of a miniature. One module a miniature fulfils it; everything else is shared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Job:
    """One batch to draw. The same job always gives the same batch.

    index: of the batch in its stream. progress: of the training when it was ordered, 0 to 1, for curricula.
    suite: name of the held-out set that it belongs to, None for training.
    """

    seed: int
    index: int
    progress: float
    suite: str | None = None

    def generator(self) -> np.random.Generator:
        stream = 0 if self.suite is None else 1 + int.from_bytes(self.suite.encode()[:8].ljust(8, b"\0"), "big")
        return np.random.default_rng([self.seed, stream, self.index])


@dataclass(frozen=True)
class Part:
    """One module of the model. build: makes it for one device, run under nnx.eval_shape. tensor: its parameter's dotted
    path -> the tensor's name in model.safetensors."""

    build: Callable[[], nnx.Module]
    tensor: Callable[[str], str]


class Scores(NamedTuple):
    """What a forward pass over a batch says. loss: scalar. task: int32 [Q], index into `tasks`, -1 for no question.
    correct: bool [Q], whether every token of the answer and its end would be chosen greedily. extra: more scalars."""

    loss: jax.Array
    task: jax.Array
    correct: jax.Array
    extra: Mapping[str, jax.Array]


@dataclass(frozen=True)
class Recipe:
    """How long and how fast. minutes: wall clock from the start of the process, evaluation and export included; steps
    instead of it makes a run that can be repeated exactly. reuse: how often a drawn batch is used. decay_from: share of
    the training after which the rate falls, in a straight line; None for a cosine from the start. matrix_rms: of Muon's
    steps, over the rate. staged: whether other programs are compiled after the first one and not beside it."""

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    peak: float = 2e-3
    floor: float = 0.02
    warmup_steps: int = 100
    decay_from: float | None = None
    weight_decay: float = 0.05
    optimizer: str = "muon"
    matrix_rms: float = 0.2
    staged: bool = False
    workers: int = 1
    reuse: int = 1
    eval_batches: int = 1
    eval_seconds: float = 30.0
    log_steps: int = 50
    save_steps: int = 0

    def __post_init__(self):
        if (self.minutes is None) == (self.steps is None):
            raise ValueError(f"minutes {self.minutes} and steps {self.steps}: give exactly one of them")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be muon or adamw")


@dataclass(frozen=True)
class Suite:
    """A held-out set. gate: the least exact match of each task, by name; absent ones are reported. programs: the
    programs its batches run, in turn; batches: how many."""

    title: str
    programs: Sequence[str]
    batches: int
    gate: Mapping[str, float] = field(default_factory=dict)


class Miniature(Protocol):
    """A small model and the task it is trained for."""

    name: str
    tasks: Sequence[str]
    suites: Mapping[str, Suite]

    def parts(self, dtype: Any) -> Mapping[str, Part]:
        """The modules, with parameters of `dtype`, by a name of one word."""
        ...

    def files(self) -> Mapping[str, str]:
        """Name and text of every file of the Hugging Face folder but the weights and the card."""
        ...

    def program(self, job: Job) -> str:
        """The name of the program that the job's batch runs: one a combination of shapes and phase of training."""
        ...

    def shapes(self, program: str) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch of that program."""
        ...

    def draw(self, job: Job) -> Batch:
        """The job's batch; runs in a worker process without an accelerator."""
        ...

    def score(self, modules: Mapping[str, nnx.Module], batch: Mapping[str, jax.Array], program: str) -> Scores:
        """The training forward, differentiable in the modules' parameters."""
        ...

    def card(self) -> Mapping[str, str]:
        """Paragraphs of the model card: `summary`, `data`, `input`, `limits`, `licence`."""
        ...
