"""The step loop: one thread that owns the devices.

A step: take what arrived -> admit -> encode the images that the next prefill pass touches, of all its requests in one
planned call -> prefill pass -> decode pass -> events out. A fault of one request ends that request; only a fault of the
devices ends the engine, and then every request is told.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import jax
import numpy as np

from serving.config import EngineConfig
from serving.metrics import Metrics
from serving.models.decoder import Selection
from serving.positions import mrope_positions
from serving.protocol import (
    EngineState,
    ErrorEvent,
    ErrorKind,
    Event,
    FinishEvent,
    FinishReason,
    Health,
    InvalidRequest,
    Overloaded,
    Submission,
    TokenEvent,
    Usage,
)
from serving.runner import Runner, rows_by_path
from serving.scheduler import Chunk, Scheduler
from serving.sequence import Sequence
from vitbatch import CompileGuard, PoolFull

logger = logging.getLogger("serving.engine")


class Engine:
    """Serves submissions on a warmed Runner; implements serving.protocol.EngineClient. Call start() once."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        model_name: str,
        eos_ids: frozenset[int],
        metrics: Metrics,
        guard: CompileGuard,
        uses_mrope: bool,
        on_death: Callable[[str], None] = lambda detail: None,
    ):
        """on_death: called once, from the engine thread, when a fault of the devices has ended it."""
        self._on_death = on_death
        self._runner, self._config, self._metrics, self._guard = runner, config, metrics, guard
        self._name, self._eos, self._uses_mrope = model_name, eos_ids, uses_mrope
        self._scheduler = Scheduler(config, runner.pages, gather_pages=runner.lm.gather_pages)
        self._arrived: deque[Sequence] = deque()
        self._aborts: set[str] = set()
        self._known: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._state: EngineState = "starting"
        self._detail = "warming up"
        self._beat = time.monotonic()
        self._orders = 0
        self._cache_seen = (0, 0, 0)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # -- any thread

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos

    def start(self) -> None:
        """Marks the compile counter and begins to serve."""
        self._guard.mark_ready()
        self._state, self._detail = "ready", ""
        self._thread.start()

    def drain(self, timeout: float) -> bool:
        """Takes no more requests and waits for the running ones; True when all ended within `timeout` seconds."""
        with self._wake:
            if self._state == "ready":
                self._state, self._detail = "draining", "shutting down"
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    def stop(self, detail: str) -> int:
        """Ends at once: every request still known gets an error event. Returns how many there were."""
        with self._wake:
            self._state, self._detail = "dead", detail
            lost = list(self._known.values())
            self._known.clear()
            self._wake.notify()
        for seq in lost:
            self._send(seq, ErrorEvent("internal", "the engine stopped"))
        return len(lost)

    def health(self) -> Health:
        return Health(self._state, time.monotonic() - self._beat, self._detail)

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> None:
        """See EngineClient.submit."""
        seq = self._check(submission, on_event)
        with self._wake:
            if self._state != "ready":
                raise Overloaded(f"the server is {self._state}", retry_after=5.0)
            if len(self._known) >= self._config.max_queue + self._config.max_seqs:
                raise Overloaded(f"{len(self._known)} requests are running or waiting; try again", retry_after=1.0)
            if submission.request_id in self._known:
                raise InvalidRequest(f"request id {submission.request_id!r} is in use")
            held = sum(s.image_bytes for s in self._known.values())
            if held and held + seq.image_bytes > self._config.max_held_image_bytes:
                raise Overloaded(f"the images of waiting requests hold {held >> 20} MiB; try again", retry_after=2.0)
            self._orders += 1
            seq.order = self._orders
            self._known[submission.request_id] = seq
            self._arrived.append(seq)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        with self._wake:
            if request_id in self._known:
                self._aborts.add(request_id)
                self._wake.notify()

    def _check(self, submission: Submission, on_event: Callable[[Event], None]) -> Sequence:
        length, limit = len(submission.prompt_ids), self._config.max_model_len
        if length == 0:
            raise InvalidRequest("the prompt has no tokens")
        if length + submission.params.max_tokens > limit:
            raise InvalidRequest(
                f"the prompt has {length} tokens and max_tokens is {submission.params.max_tokens}, together over the "
                f"model's {limit}; shorten the prompt or lower max_tokens"
            )
        vocab = self._runner.lm.decoder.vocab_size
        if min(submission.prompt_ids) < 0 or max(submission.prompt_ids) >= vocab:
            raise InvalidRequest(f"a prompt token id is outside 0 .. {vocab - 1}")
        spans = submission.images
        encoder = self._runner.encoder
        if spans and encoder is None:
            raise InvalidRequest("this model takes no images")
        for span in spans:
            assert encoder is not None
            try:
                encoder.check(span.image)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error
        rows = sum({s.image.key: s.image.num_tokens for s in spans}.values())
        if encoder is not None and rows > encoder.pool.shape[0]:
            raise InvalidRequest(
                f"the images have {rows} tokens together, over the {encoder.pool.shape[0]} the server holds; "
                f"send fewer or smaller images"
            )
        if self._uses_mrope:
            merge = encoder.vision_config.merge_size if encoder is not None else 1
            positions, delta = mrope_positions(length, [(s.start, s.image.grid_thw) for s in spans], merge)
        else:
            positions, delta = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length)), 0
        seed = submission.params.seed
        seed = secrets.randbits(32) if seed is None else seed & 0xFFFFFFFF
        return Sequence(submission, on_event, positions, delta, seed)

    # -- the engine thread

    def _loop(self) -> None:
        try:
            while self._state != "dead":
                self._beat = time.monotonic()
                with self._wake:
                    idle = not (self._arrived or self._aborts or self._scheduler.running or self._scheduler.waiting)
                    if idle and self._state == "draining":
                        return
                    if idle:
                        self._wake.wait(timeout=0.5)
                        continue
                self._take_arrivals()
                self._step()
                self._report()
        except Exception as error:
            # Donated caches may be gone: nothing that runs now can be finished.
            logger.exception("the engine stopped")
            self.stop(f"{type(error).__name__} in the step loop")
            self._on_death(self._detail)

    def _take_arrivals(self) -> None:
        with self._wake:
            arrived, self._arrived = self._arrived, deque()
            aborts, self._aborts = self._aborts, set()
            aborted = [self._known[r] for r in aborts if r in self._known]
        for seq in arrived:
            self._scheduler.add(seq)
        for seq in aborted:
            self._finish(seq, "abort")

    def _step(self) -> None:
        scheduler = self._scheduler
        scheduler.admit()
        chunks = self._with_images(scheduler.prefill())
        if chunks:
            selection = self._runner.selection_for(chunks)
            tokens = self._runner.prefill(chunks, selection)
            self._count_rows(chunks, selection)
            for chunk, token in zip(chunks, tokens, strict=True):
                chunk.seq.computed = chunk.stop
                self._release_used_images(chunk.seq)
                if chunk.finishes_prompt:
                    self._take_token(chunk.seq, int(token))
        self._beat = time.monotonic()
        fresh = {chunk.seq for chunk in chunks}
        due, preempted = scheduler.decode()
        due = [seq for seq in due if seq not in fresh]
        for seq in preempted:
            self._release(seq)
        if due:
            for seq, token in zip(due, self._runner.decode(due), strict=True):
                seq.computed = len(seq.tokens)
                self._take_token(seq, int(token))
        holders = [s for s in (*scheduler.running, *scheduler.waiting) if any(x is not None for x in s.slots)]
        if not chunks and not due and holders:
            # Requests wait for room in the row pool while each holds a part of it: the youngest of them lets go.
            self._release(max(holders, key=lambda s: s.order))

    def _take_token(self, seq: Sequence, token: int) -> None:
        if token < 0:
            return self._fail(seq, "internal", "the model gave logits that are not finite for this request")
        seq.tokens.append(token)
        if not self._send(seq, TokenEvent(token)):
            return self._finish(seq, "abort")
        params = seq.submission.params
        if token in self._eos and not params.ignore_eos:
            self._finish(seq, "stop")
        elif seq.generated >= params.max_tokens:
            self._finish(seq, "length")
        return None

    # -- images

    def _with_images(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks whose images are all in the row pool, after encoding what is missing. A request whose images find
        no room now keeps its place and is tried again in the next step."""
        missing = {c.seq: [i for i in c.seq.images_in(c.start, c.stop) if c.seq.slots[i] is None] for c in chunks}
        wanting = [seq for seq, images in missing.items() if images]
        encoder = self._runner.encoder
        together = bool(wanting) and encoder is not None and encoder.batches_requests()
        groups = [wanting] if together else [[seq] for seq in wanting]
        waiting: set[Sequence] = set()
        for group in groups:
            waiting |= self._encode(group, missing)
        return [c for c in chunks if c.seq not in waiting and c.seq in self._scheduler.running]

    def _release(self, seq: Sequence, done_before: int | None = None) -> None:
        """Unpins a request's encoded images; with done_before only those that end at or before that token."""
        if self._runner.encoder is None:
            return
        for i, span in enumerate(seq.images):
            if seq.slots[i] is not None and (done_before is None or span.stop <= done_before):
                self._runner.encoder.release([span.image.key])
                seq.slots[i] = None

    def _release_used_images(self, seq: Sequence) -> None:
        """Rows whose tokens are all in the paged cache are needed no more, unless the request is preempted and starts
        over; then they are encoded, or found in the encoder's cache, again."""
        self._release(seq, done_before=seq.computed)

    def _encode(self, group: list[Sequence], missing: dict[Sequence, list[int]]) -> set[Sequence]:
        """Encodes the missing images of a group of requests; returns the requests that must wait."""
        encoder = self._runner.encoder
        assert encoder is not None
        wanted = [(seq, i) for seq in group for i in missing[seq]]
        try:
            out = encoder.encode_to_pool([seq.images[i].image for seq, i in wanted])
        except PoolFull:
            if len(group) > 1:
                return set().union(*(self._encode([seq], missing) for seq in group))
            return set(group)
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) or encoder.pool.is_deleted():
                raise  # the devices failed, not the image
            if len(group) > 1:
                return set().union(*(self._encode([seq], missing) for seq in group))
            logger.exception("request %s: encoding failed", group[0].request_id)
            self._fail(group[0], "internal", f"{type(error).__name__} while encoding the images")
            return set()
        self._beat = time.monotonic()
        for (seq, i), slots, call in zip(wanted, out.slots, out.call_of, strict=True):
            seq.slots[i] = slots
            number = None if call is None else out.calls[call].call_id
            if number is not None and number not in seq.calls:
                seq.calls.append(number)
        for call in out.calls:
            self._metrics.vit_call(images=call.images, lanes_filled=call.lanes_filled, padded_ratio=call.padded_ratio)
        return set()

    # -- ends

    def _send(self, seq: Sequence, event: Event) -> bool:
        """False when the receiver is broken, or has had its last event: its fault must not reach the others."""
        if seq.closed:
            return False
        seq.closed = not isinstance(event, TokenEvent)
        try:
            seq.on_event(event)
        except Exception:
            logger.exception("request %s: its receiver raised", seq.request_id)
            return False
        return True

    def _usage(self, seq: Sequence) -> Usage:
        images = sum(span.image.num_tokens for span in seq.images)
        return Usage(prompt_tokens=seq.prompt_length, completion_tokens=seq.generated, image_tokens=images)

    def _drop(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        self._release(seq)
        with self._lock:
            self._known.pop(seq.request_id, None)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._drop(seq)
        self._send(seq, FinishEvent(reason, self._usage(seq), tuple(seq.calls)))

    def _fail(self, seq: Sequence, kind: ErrorKind, message: str) -> None:
        self._drop(seq)
        self._send(seq, ErrorEvent(kind, message))

    # -- counts

    def _count_rows(self, chunks: list[Chunk], selection: Selection) -> None:
        if self._runner.lm.decoder.indexer is not None:
            for path, rows in rows_by_path(chunks, selection).items():
                self._metrics.indexer_rows(path, rows)

    def _report(self) -> None:
        scheduler = self._scheduler
        self._metrics.set_queue(running=len(scheduler.running), waiting=len(scheduler.waiting))
        self._metrics.set_pages(used=scheduler.pages.used, total=scheduler.pages.total)
        if self._runner.encoder is not None:
            cache = self._runner.encoder.cache
            now = (cache.hits, cache.misses, cache.evictions)
            hits, misses, evictions = (a - b for a, b in zip(now, self._cache_seen, strict=True))
            self._metrics.encoder_cache(hits=hits, misses=misses, evictions=evictions)
            self._cache_seen = now
