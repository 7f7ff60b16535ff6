"""Who is computed next: continuous batching of decode with chunked prefill under one row budget. Host only.

First come, first served. A waiting request is admitted when a seat and the pages of all its tokens are free. When a
running request needs one more page and none is free, the youngest running request gives its pages back and waits at the
front of the queue; its tokens, the generated ones too, are computed again later, so nothing is lost.
"""

from collections import deque
from dataclasses import dataclass

from serving.config import ROW_TILE, EngineConfig
from serving.pages import PageAllocator
from serving.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence, computed in one prefill pass."""

    seq: Sequence
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Rows the chunk takes in a pass, its padding to whole row tiles included."""
        return -(-(self.stop - self.start) // ROW_TILE) * ROW_TILE

    @property
    def finishes_prompt(self) -> bool:
        return self.stop == len(self.seq.tokens)


class Scheduler:
    """Queues and cache pages. Not thread-safe: the engine thread owns it."""

    def __init__(self, config: EngineConfig, pages: int, *, gather_pages: int = 0):
        """gather_pages: most pages all requests of one prefill pass may have together (0: no limit)."""
        self.config, self.pages, self.gather_pages = config, PageAllocator(pages), gather_pages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its pages."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.pages.give_back(seq.pages)
        seq.pages = []

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def admit(self) -> None:
        """Moves waiting requests to running while seats and pages last."""
        while self.waiting and len(self.running) < self.config.max_seqs:
            seq = self.waiting[0]
            pages = self.pages.take(self._pages_for(len(seq.tokens)))
            if pages is None:
                return
            seq.pages = pages
            self.running.append(self.waiting.popleft())

    def prefill(self) -> list[Chunk]:
        """Chunks of the next prefill pass, oldest request first, within the row budget."""
        chunks: list[Chunk] = []
        rows, pages = self.config.prefill_tokens, self.gather_pages or self.pages.total
        for seq in self.running:
            if not seq.in_prefill or rows <= 0:
                continue
            stop = min(len(seq.tokens), seq.computed + rows)
            needed = self._pages_for(stop)
            if needed > pages:
                break
            chunk = Chunk(seq, seq.computed, stop)
            chunks.append(chunk)
            rows, pages = rows - chunk.rows, pages - needed
        return chunks

    def decode(self) -> tuple[list[Sequence], list[Sequence]]:
        """(due, preempted): the sequences whose next token is due, each with a page for it, and the youngest ones that
        gave way because pages ran out."""
        preempted = []
        due = [s for s in self.running if not s.in_prefill]
        for seq in due:
            while seq in self.running and len(seq.pages) < self._pages_for(len(seq.tokens)):
                page = self.pages.take(1)
                if page is not None:
                    seq.pages += page
                else:
                    preempted.append(self._preempt(max(self.running, key=lambda s: s.order)))
        return [s for s in due if s in self.running], preempted

    def _preempt(self, seq: Sequence) -> Sequence:
        self.running.remove(seq)
        self.pages.give_back(seq.pages)
        seq.pages, seq.computed = [], 0
        self.waiting.appendleft(seq)
        self.preemptions += 1
        return seq
