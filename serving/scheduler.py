"""Who is computed next: continuous batching of decode with chunked prefill under one row budget. Host only.

Who comes in: first come, first served. A waiting request is admitted when a seat and the pages of all its tokens are
free, those counted out that it finds in the prefix cache; nobody overtakes, so a large request is never starved.

Who is prefilled: half of each pass belongs to the oldest prompt, the other half to the prompts with the least left to
compute, and what one half leaves over the other takes. So a long prompt does not hold up short ones, and moves on in
every pass once it is the oldest, however many short ones come.

Who gives way: when a running request needs one more page and none is free, the youngest running request gives its pages
back and waits at the front of the queue; its tokens, the generated ones too, are computed again later or found in the
prefix cache, so nothing is lost.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from serving.config import ROW_TILE, EngineConfig
from serving.pages import PagePool
from serving.prefix import extend_keys
from serving.sequence import NO_SEAT, Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence, computed in one prefill pass. align: the next one's rows start at a multiple
    of it."""

    seq: Sequence
    start: int
    stop: int
    align: int = ROW_TILE

    @property
    def rows(self) -> int:
        """Rows the chunk takes in a pass, its padding included."""
        return -(-(self.stop - self.start) // self.align) * self.align

    @property
    def finishes_prompt(self) -> bool:
        return self.stop == len(self.seq.tokens)


class Scheduler:
    """Queues, seats and cache pages. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        pages: int,
        *,
        gather_pages: int = 0,
        align: int = ROW_TILE,
        keeps_state: bool = False,
    ):
        """gather_pages: most pages all requests of one prefill pass may have together (0: no limit). align: see Chunk.
        keeps_state: the decoder keeps a state a request, so what another request has computed is of no use: its pages
        come without the state that belongs to them."""
        if config.prefill_tokens < align:
            raise ValueError(f"prefill_tokens is {config.prefill_tokens}; this model needs at least {align}")
        self.config, self.pages, self.gather_pages, self.align = config, PagePool(pages), gather_pages, align
        self._shares = config.prefix_cache and not keeps_state
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._seats = list(range(config.max_seqs - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its seat and pages."""
        if seq in self.running:
            self._unseat(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def _unseat(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._seats.append(seq.seat)
        seq.seat = NO_SEAT
        self.pages.give_back(seq.drop_pages())

    def check(self) -> None:
        """Raises RuntimeError unless seats and pages are held by exactly the running requests."""
        seats = sorted([*self._seats, *(s.seat for s in self.running)])
        if seats != list(range(self.config.max_seqs)):
            raise RuntimeError(f"seats that are free or taken: {seats}; each must be there once")
        if any(s.page_count or s.seat != NO_SEAT for s in self.waiting):
            raise RuntimeError("a waiting request holds a seat or pages")
        self.pages.check([s.pages for s in self.running])

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    # -- the prefix cache

    def _keys(self, seq: Sequence) -> list[bytes]:
        return extend_keys(seq, self.config.page_size) if self._shares else []

    def _shareable(self, seq: Sequence) -> list[bytes]:
        """Keys of the pages it may take from others: the last token is always computed, for its logits; all are where
        log-probabilities of the prompt are asked for."""
        if seq.submission.params.prompt_logprobs is not None and seq.generated == 0:
            return []
        return self._keys(seq)[: (len(seq.tokens) - 1) // self.config.page_size]

    def _found(self, seq: Sequence, tokens: int) -> None:
        """Counts tokens found in the cache; those found again after a preemption were counted before."""
        seq.computed += tokens
        if not seq.preempted:
            seq.cached += tokens

    def publish(self, seq: Sequence, computed: int) -> None:
        """Offers the full pages among its first `computed` tokens, which are in the cache, to others."""
        full = computed // self.config.page_size
        if full <= seq.published:
            return
        keys, table = self._keys(seq), seq.table
        for page in range(seq.published, min(full, len(keys))):
            self.pages.publish(int(table[page]), keys[page])
        seq.published = full

    def _adopt(self, seq: Sequence) -> None:
        """Takes the pages that have been computed by others since it was admitted."""
        size, keys = self.config.page_size, self._shareable(seq)
        while seq.computed % size == 0 and (page := seq.computed // size) < len(keys):
            shared = self.pages.share(keys[page])
            if shared is None:
                return
            self.pages.give_back([seq.swap_page(page, shared)])
            self._found(seq, size)

    # -- a step

    def admit(self) -> list[Sequence]:
        """Moves waiting requests to running while seats and pages last; returns them."""
        admitted = []
        while self.waiting and self._seats:
            seq = self.waiting[0]
            shared: list[int] = []
            for key in self._shareable(seq):
                page = self.pages.share(key)
                if page is None:
                    break
                shared.append(page)
            own = self.pages.take(self._pages_for(len(seq.tokens)) - len(shared))
            if own is None:
                self.pages.give_back(shared)
                break
            seq.add_pages(shared + own)
            seq.published = len(shared)
            self._found(seq, len(shared) * self.config.page_size)
            seq.seat = self._seats.pop()
            self.running.append(self.waiting.popleft())
            admitted.append(seq)
        return admitted

    def decode(self, *, may_preempt: bool = True) -> tuple[list[Sequence], list[Sequence]] | None:
        """(due, preempted): the sequences whose next token is due, each with a page for it, and the youngest ones that
        gave way because pages ran out. None, and nothing changed, when somebody must give way and may not."""
        due = [s for s in self.running if not (s.in_prefill or s.is_complete)]
        size, preempted = self.config.page_size, []
        needy = [s for s in due if s.page_count * size < s.length]
        if len(needy) > self.pages.free and not may_preempt:
            return None
        for seq in needy:
            while seq.seat != NO_SEAT:
                page = self.pages.take(1)
                if page is not None:
                    seq.add_pages(page)
                    break
                preempted.append(self._preempt(max(self.running, key=lambda s: s.order)))
        return ([s for s in due if s.seat != NO_SEAT] if preempted else due), preempted

    def _preempt(self, seq: Sequence) -> Sequence:
        assert not seq.pending, "a token on its way would be lost"
        self._unseat(seq)
        seq.computed = seq.published = 0
        seq.in_prefill = seq.preempted = True
        self.waiting.appendleft(seq)
        self.preemptions += 1
        return seq

    def prefill(self, in_flight: Iterable[Chunk] = ()) -> list[Chunk]:
        """Chunks of the next prefill pass, within the row budget. A page is computed once: a request whose next page
        is part of a chunk in flight, or of another one of this pass, waits for it."""
        prompts = [s for s in self.running if s.in_prefill]
        if not prompts:
            return []
        for seq in prompts:
            self._adopt(seq)
        prompts.sort(key=lambda s: s.order)
        others = sorted(prompts[1:], key=lambda s: len(s.tokens) - s.computed)
        half = -(-self.config.prefill_tokens // (2 * self.align)) * self.align
        filling = _Pass(self, in_flight)
        filling.add(prompts[0], half)
        for seq in others:
            filling.add(seq, filling.rows)
        filling.grow(prompts[0])
        return filling.chunks


class _Pass:
    """A prefill pass as it fills up."""

    def __init__(self, scheduler: Scheduler, in_flight: Iterable[Chunk]):
        self.rows = scheduler.config.prefill_tokens // scheduler.align * scheduler.align
        self._pages = scheduler.gather_pages or scheduler.pages.total
        self._scheduler, self.chunks = scheduler, list[Chunk]()
        self._claimed: set[bytes] = set()
        for chunk in in_flight:
            self._claim(chunk)

    def _claim(self, chunk: Chunk) -> None:
        size, keys = self._scheduler.config.page_size, chunk.seq.page_keys
        self._claimed.update(keys[chunk.start // size : -(-chunk.stop // size)])

    def add(self, seq: Sequence, rows: int) -> None:
        """Adds as much of a prompt as fits `rows`, or nothing while it waits for another one's page."""
        size, keys = self._scheduler.config.page_size, self._scheduler._shareable(seq)
        page = seq.computed // size
        if rows <= 0 or (seq.computed % size == 0 and page < len(keys) and keys[page] in self._claimed):
            return
        stop = min(len(seq.tokens), seq.computed + rows)
        gathered = -(-stop // size)
        if gathered > self._pages:
            return
        chunk = Chunk(seq, seq.computed, stop, self._scheduler.align)
        self.chunks.append(chunk)
        self._claim(chunk)
        self.rows, self._pages = self.rows - chunk.rows, self._pages - gathered

    def grow(self, seq: Sequence) -> None:
        """Gives a request that was added first what the others left over."""
        if not self.chunks or self.chunks[0].seq is not seq:
            return self.add(seq, self.rows)
        first, size = self.chunks[0], self._scheduler.config.page_size
        stop = min(len(seq.tokens), first.start + first.rows + self.rows)
        if -(-stop // size) <= self._pages + -(-first.stop // size):
            self.chunks[0] = Chunk(seq, first.start, stop, first.align)
        return None
