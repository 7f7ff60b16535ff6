"""Steps of passes over the devices: planned, dispatched, and read one step later.

A step: plan the decode pass -> admit -> plan the prefill pass -> encode the images that it touches, of all its requests
in one planned call -> dispatch both passes -> tell requests what was read before -> read the tokens of the step before.
So while the devices compute a step the host reads what the last one gave and plans the next; at most one step is in
flight. An end that only a token tells (eos, a stop string, a broken receiver) is found when the next step is on its
way, and what that step gives for the request is thrown away. Its pages and seat may be handed out at once: the devices
run steps in the order of their dispatch.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import jax

from serving.config import EngineConfig
from serving.image_rows import ImageRows
from serving.metrics import Metrics
from serving.models.decoder import Selection
from serving.runner import Runner, rows_by_path
from serving.sampling import Sampled
from serving.scheduler import Chunk, Scheduler
from serving.sequence import Sequence

NOT_FINITE = "the model gave logits that are not finite for this request"


@dataclass(frozen=True)
class _Flight:
    """A step on its way: its passes, and what they sample."""

    chunks: list[Chunk]
    prefilled: Sampled | None
    due: list[Sequence]
    decoded: Sampled | None


class Pipeline:
    """Not thread-safe: the engine thread owns it.

    beat(doing): called around each call of the devices. on_token(seq, token, sampled, row): the next token of a
    request. fail(seq, message): ends a request. tell(): hands out what these two and earlier ones came to, called when
    there is time for it.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        metrics: Metrics,
        *,
        beat: Callable[[str], None],
        on_token: Callable[[Sequence, int, Sampled, int], None],
        fail: Callable[[Sequence, str], None],
        tell: Callable[[], None],
    ):
        self._runner, self._metrics, self._beat = runner, metrics, beat
        self._on_token, self._fail, self._tell = on_token, fail, tell
        lm = runner.lm
        self.scheduler = Scheduler(
            config, runner.pages, gather_pages=lm.gather_pages, align=lm.row_align, keeps_state=lm.keeps_state
        )
        self.images = ImageRows(runner.encoder, metrics, fail=fail, beat=beat)
        self.steps = 0
        self._flight: _Flight | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._flight)

    def step(self) -> None:
        """Plans and dispatches a step, then reads the one before."""
        self.steps += 1
        with self._doing("plan"):
            due, chunks = self._plan()
        if chunks or (self._flight and self._flight.chunks):
            # The launches of a prefill pass, or those behind one, may wait for the devices as long as one computes.
            self._tell_now()
        with self._doing("dispatch"):
            dispatched = self._dispatch(chunks, due)
        self._tell_now()
        self._collect()
        self._flight = dispatched

    def settle(self) -> None:
        """Reads and tells the step in flight, if there is one; the devices then have nothing to do."""
        self._collect()
        jax.block_until_ready(self._runner.latest)
        self._tell_now()

    def _tell_now(self) -> None:
        with self._doing("tell"):
            self._tell()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._metrics.spent(what, time.perf_counter() - begin)

    @partial(jax.profiler.annotate_function, name="plan")
    def _plan(self) -> tuple[list[Sequence], list[Chunk]]:
        """The decode pass and the prefill pass of this step."""
        scheduler = self.scheduler
        planned = scheduler.decode(may_preempt=self._flight is None)
        if planned is None:
            # Tokens on their way may free pages, and whoever gives way must have all of its own.
            self._collect()
            planned = scheduler.decode()
            assert planned is not None
        due, preempted = planned
        for seq in preempted:
            self.images.release(seq)
        if preempted:
            self._metrics.preempted(len(preempted))
        for seq in scheduler.admit():
            if not seq.admitted:
                seq.admitted, seq.seated_at = True, time.monotonic()
        chunks = self.images.ready(scheduler.prefill(self._flight.chunks if self._flight else ()))
        if not (chunks or due or self._flight):
            self.images.release_youngest((*scheduler.running, *scheduler.waiting))
        return due, chunks

    def _dispatch(self, chunks: list[Chunk], due: list[Sequence]) -> _Flight | None:
        prefilled = decoded = None
        if chunks:
            selection = self._runner.selection_for(chunks)
            self._beat("dispatching a prefill pass")
            prefilled = self._runner.prefill(chunks, selection)
            self._count_rows(chunks, selection)
            for chunk in chunks:
                chunk.seq.computed = chunk.stop
                self.images.release(chunk.seq, done_before=chunk.stop)
                if chunk.finishes_prompt:
                    chunk.seq.in_prefill = False
                    chunk.seq.pending += 1
        if due:
            self._beat("dispatching a decode pass")
            decoded = self._runner.decode(due)
            for seq in due:
                seq.computed = seq.length
                seq.pending += 1
        self._beat("")
        if not (chunks or due):
            return None
        self._metrics.step(sum(chunk.stop - chunk.start for chunk in chunks) + len(due))
        return _Flight(chunks, prefilled, due, decoded)

    @partial(jax.profiler.annotate_function, name="collect")
    def _collect(self) -> None:
        """Waits for the step in flight and tells what it gave. Requests that ended meanwhile are passed over."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._beat("waiting for the devices")
        told = any(s.submission.params.logprobs is not None for s in (*flight.due, *(c.seq for c in flight.chunks)))
        with self._doing("wait"):
            prefilled = flight.prefilled.on_host(told=told) if flight.prefilled else None
            decoded = flight.decoded.on_host(told=told) if flight.decoded else None
        self._beat("")
        with self._doing("tell"):
            for row, chunk in enumerate(flight.chunks):
                if prefilled is not None and not chunk.seq.closed:
                    self._take(chunk.seq, prefilled, row, chunk.stop, chunk.finishes_prompt)
            for row, seq in enumerate(flight.due):
                if decoded is not None and not seq.closed:
                    self._take(seq, decoded, row, len(seq.tokens), True)

    def _take(self, seq: Sequence, sampled: Sampled, row: int, computed: int, is_next: bool) -> None:
        """What a pass gave for a request: its first `computed` tokens are in the cache, and if is_next there is one
        more."""
        token = int(sampled.tokens[row])
        if token < 0:
            # Nobody may find what it computed: it may be what is not finite.
            self.scheduler.pages.forget(seq.pages)
            return self._fail(seq, NOT_FINITE)
        self.scheduler.publish(seq, computed)
        if is_next:
            seq.pending -= 1
            self._on_token(seq, token, sampled, row)
        return None

    def _count_rows(self, chunks: list[Chunk], selection: Selection) -> None:
        if self._runner.lm.decoder.indexer is not None:
            for path, rows in rows_by_path(chunks, selection).items():
                self._metrics.indexer_rows(path, rows)
