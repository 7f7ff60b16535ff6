"""One request as the engine sees it."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from serving.protocol import Event, ImageSpan, Submission, TokenLogprobs
from serving.sampling import SampleArgs

NO_SEAT = -1


@dataclass(eq=False)
class Sequence:
    """A request's tokens and where they are in the cache.

    tokens: prompt and generated ids that the host knows. pending: tokens sampled on the devices that it does not know
    yet. computed: how many tokens are in the cache, those of dispatched passes included. in_prefill: a prefill pass
    that ends with its last known token is still to come. seat: its row in what the devices keep a running request
    (NO_SEAT while it waits). admitted: it had a seat once. page_keys: see serving.prefix. published: leading pages that
    were offered to others. cached: prompt tokens that were found instead of computed. positions, delta: rotary
    positions of the prompt, and the offset of what follows. slots: pool rows of each image, None until it is encoded.
    calls: numbers of the vision calls that encoded its images. closed: its end is told. scores: of the prompt's tokens
    but the first, as far as they are computed, if asked for. ends: ids that end the answer. sampling: its row of
    SampleArgs. arrived_at, seated_at, first_token_at: when, by time.monotonic; 0 before.
    """

    submission: Submission
    on_event: Callable[[Event], None]
    positions: np.ndarray
    delta: int
    seed: int
    order: int = 0
    closed: bool = False
    admitted: bool = False
    preempted: bool = False
    tokens: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    in_prefill: bool = True
    seat: int = NO_SEAT
    page_keys: list[bytes] = field(default_factory=list)
    published: int = 0
    cached: int = 0
    slots: list[np.ndarray | None] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    prompt_length: int = 0
    arrived_at: float = field(default_factory=time.monotonic)
    seated_at: float = 0.0
    first_token_at: float = 0.0

    def __post_init__(self):
        self.sampling = SampleArgs.rows(self.submission.params, self.seed)
        self.tokens = list(self.submission.prompt_ids)
        self.slots = [None] * len(self.submission.images)
        self.prompt_length = len(self.tokens)
        self.page_count, self._table = 0, np.zeros(0, np.int32)

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        return self.submission.images

    # -- its pages

    @property
    def table(self) -> np.ndarray:
        """Its cache pages in order, int32 [page_count]."""
        return self._table[: self.page_count]

    @property
    def pages(self) -> list[int]:
        return self.table.tolist()

    def add_pages(self, pages: Seq[int]) -> None:
        end = self.page_count + len(pages)
        if end > len(self._table):
            self._table = np.resize(self._table, max(end, 2 * len(self._table)))
        self._table[self.page_count : end] = pages
        self.page_count = end

    def swap_page(self, at: int, page: int) -> int:
        """Puts a page in the place of its own one, which it returns."""
        own = int(self.table[at])
        self._table[at] = page
        return own

    def drop_pages(self) -> list[int]:
        """Forgets its pages and returns them."""
        pages, self.page_count = self.pages, 0
        return pages

    # -- its tokens

    @property
    def length(self) -> int:
        """Tokens it has, those that the host does not know yet included."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        """Tokens of the answer, known or not."""
        return len(self.tokens) + self.pending - self.prompt_length

    @property
    def is_complete(self) -> bool:
        """The answer has all the tokens it may have, even if the last is not known yet."""
        return self.generated >= self.submission.params.max_tokens

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
