"""One request as the engine sees it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serving.protocol import Event, ImageSpan, Submission


@dataclass(eq=False)
class Sequence:
    """A request's tokens and where they are in the cache.

    tokens: prompt and generated ids. computed: how many of them are in the cache. pages: its cache pages in order.
    positions, delta: rotary positions of the prompt, and the offset of what follows. slots: pool rows of each image,
    None until it is encoded. calls: numbers of the vision calls that encoded its images. closed: its end is told.
    """

    submission: Submission
    on_event: Callable[[Event], None]
    positions: np.ndarray
    delta: int
    seed: int
    order: int = 0
    closed: bool = False
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slots: list[np.ndarray | None] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.tokens = list(self.submission.prompt_ids)
        self.slots = [None] * len(self.submission.images)

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        return self.submission.images

    @property
    def prompt_length(self) -> int:
        return len(self.submission.prompt_ids)

    @property
    def image_bytes(self) -> int:
        """Host memory its prepared images hold."""
        return sum({span.image.key: span.image.patches.nbytes for span in self.images}.values())

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def in_prefill(self) -> bool:
        """More than the last sampled token is still to be computed."""
        return self.computed < len(self.tokens) - 1 or self.generated == 0

    def positions_of(self, start: int, stop: int) -> np.ndarray:
        """Rotary positions int32 [3, stop - start] of tokens [start, stop); generated tokens continue as text."""
        cut = min(max(self.prompt_length, start), stop)
        inside = self.positions[:, start:cut]
        after = np.broadcast_to(np.arange(cut, stop, dtype=np.int32) + self.delta, (3, stop - cut))
        return np.concatenate([inside, after], axis=1)

    def images_in(self, start: int, stop: int) -> list[int]:
        """Numbers of the images that have a placeholder in tokens [start, stop)."""
        return [i for i, span in enumerate(self.images) if span.start < stop and span.stop > start]

    def pool_index_of(self, start: int, stop: int) -> np.ndarray:
        """Pool row int32 of each token in [start, stop), -1 for text. Its images must be encoded."""
        index = np.full(stop - start, -1, np.int32)
        for i in self.images_in(start, stop):
            span, slots = self.images[i], self.slots[i]
            assert slots is not None
            a, b = max(span.start, start), min(span.stop, stop)
            index[a - start : b - start] = slots[a - span.start : b - span.start]
        return index
