"""The engine: one thread that owns the devices, and what other threads may ask of it.

Each turn of its loop takes in what arrived and what was aborted, and makes one step (serving.pipeline). A fault of one
request ends that request; only a fault of the devices ends the engine, and then every request is told.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from serving.admission import Admission, check_room
from serving.config import EngineConfig
from serving.heartbeat import Heartbeat, Pulse
from serving.metrics import Metrics
from serving.outbox import Outbox
from serving.pipeline import Pipeline
from serving.protocol import (
    EngineState,
    ErrorEvent,
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
from serving.runner import Runner
from serving.sampling import Sampled
from serving.sequence import Sequence
from vitbatch import CompileGuard

logger = logging.getLogger("serving.engine")

T = TypeVar("T")


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
        self._name, self._eos = model_name, eos_ids
        self._admission = Admission(
            config, runner.lm.decoder.vocab_size, runner.encoder, eos_ids=eos_ids, uses_mrope=uses_mrope
        )
        self.heartbeat = Heartbeat()
        self._outbox = Outbox()
        self._pipeline = Pipeline(
            runner,
            config,
            metrics,
            beat=self.heartbeat.beat,
            on_token=self._take_token,
            fail=self._fail,
            tell=self._tell,
        )
        self._scheduler, self._images = self._pipeline.scheduler, self._pipeline.images
        self._arrived: deque[Sequence] = deque()
        self._aborts: set[str] = set()
        self._chores: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._serves = False
        self._known: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._state: EngineState = "starting"
        self._detail = "warming up"
        self._orders = 0
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

    @property
    def steps(self) -> int:
        """Steps begun since the start."""
        return self._pipeline.steps

    def start(self) -> None:
        """Marks the compile counter and begins to serve."""
        self._guard.mark_ready()
        self._state, self._detail = "ready", ""
        self._serves = True
        self.heartbeat.beat()
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

    def pulse(self) -> Pulse:
        """How the engine thread is, for the watchdog."""
        if self._state in ("starting", "dead"):
            return "over"
        if self._thread.is_alive():
            return "running"
        return "over" if self._state == "draining" else "gone"

    def stop(self, detail: str) -> int:
        """Ends at once: every request still known gets an error event. Returns how many there were."""
        with self._wake:
            self._state, self._detail = "dead", detail
            lost = list(self._known.values())
            self._known.clear()
            self._wake.notify()
        for seq in lost:
            self._outbox.put(seq, ErrorEvent("internal", "the engine stopped"))
        self._outbox.deliver()
        return len(lost)

    def health(self) -> Health:
        if self.pulse() == "gone":
            return Health("dead", self.heartbeat.age, "the engine's thread is gone")
        return Health(self._state, self.heartbeat.age, self._detail)

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> None:
        """See EngineClient.submit."""
        seq = self._admission.sequence(submission, on_event)
        with self._wake:
            if self._state != "ready":
                raise Overloaded(f"the server is {self._state}", retry_after=5.0)
            if submission.request_id in self._known:
                raise InvalidRequest(f"request id {submission.request_id!r} is in use")
            check_room(self._config, self._known.values(), seq)
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

    def between_steps(self, work: Callable[[], T], timeout: float = 60.0) -> T:
        """What `work` gives when nothing of this engine is on the devices. The engine's thread runs it while there is
        one. Raises TimeoutError when that does not come to it in `timeout` seconds, or is stopped amid a step; then it
        will not be run."""
        done: Future[T] = Future()
        with self._wake:
            serves = self._serves
            if serves and self._state == "dead":
                raise TimeoutError
            if serves:
                self._chores.append((work, done))
                self._wake.notify()
        if not serves:
            return work()
        try:
            return done.result(timeout)
        except TimeoutError:
            if done.cancel():
                raise
            return done.result()

    # -- the engine thread

    def _loop(self) -> None:
        try:
            self._serve()
        finally:
            with self._wake:
                self._serves = False
            self._do_chores()

    def _serve(self) -> None:
        try:
            while self._state != "dead":
                self.heartbeat.beat()
                if not self._pipeline.has_work:
                    self._tell()
                with self._wake:
                    idle = not (self._arrived or self._aborts or self._chores or self._pipeline.has_work)
                    if idle and self._state == "draining":
                        return
                    if idle:
                        self._wake.wait(timeout=0.5)
                        continue
                if self._chores:
                    self._pipeline.settle()
                    self._do_chores()
                self._take_arrivals()
                self._pipeline.step()
                self._report()
        except Exception as error:
            # Donated caches may be gone: nothing that runs now can be finished.
            logger.exception("the engine stopped")
            self.stop(f"{type(error).__name__} in the step loop")
            self._on_death(self._detail)

    def _do_chores(self) -> None:
        while self._chores:
            work, done = self._chores.popleft()
            if done.set_running_or_notify_cancel():
                self.heartbeat.beat("working between steps")
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
                self.heartbeat.beat()

    def _take_arrivals(self) -> None:
        with self._wake:
            arrived, self._arrived = self._arrived, deque()
            aborts, self._aborts = self._aborts, set()
            aborted = [self._known[r] for r in aborts if r in self._known]
        for seq in arrived:
            self._scheduler.add(seq)
        for seq in aborted:
            self._finish(seq, "abort")

    def _take_token(self, seq: Sequence, token: int, sampled: Sampled, row: int) -> None:
        """The next token of a request; `row` of what was sampled is about it."""
        params, is_first = seq.submission.params, len(seq.tokens) == seq.prompt_length
        if is_first:
            self._metrics.prefix_cache(queries=seq.prompt_length, hits=seq.cached)
            seq.first_token_at = time.monotonic()
        seq.tokens.append(token)
        logprobs = None
        if params.logprobs is not None:
            assert sampled.scores is not None, "drawn by a program that tells no scores"
            logprobs = sampled.scores.entry(row, params.logprobs)
        prompt = tuple(seq.scores) if is_first and params.prompt_logprobs is not None else None
        self._outbox.put(seq, TokenEvent(token, logprobs, prompt))
        if token in seq.ends:
            self._finish(seq, "stop")
        elif len(seq.tokens) - seq.prompt_length >= params.max_tokens:
            self._finish(seq, "length")

    # -- ends

    def _tell(self) -> None:
        """Hands out what requests are to be told; who takes nothing any more is aborted."""
        for seq in self._outbox.deliver():
            self._finish(seq, "abort")

    def _usage(self, seq: Sequence) -> Usage:
        return Usage(
            prompt_tokens=seq.prompt_length,
            completion_tokens=len(seq.tokens) - seq.prompt_length,
            image_tokens=sum(span.image.num_tokens for span in seq.images),
            cached_tokens=seq.cached,
        )

    def _drop(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        self._images.release(seq)
        with self._lock:
            self._known.pop(seq.request_id, None)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._drop(seq)
        if seq.first_token_at:
            self._metrics.phases(
                queue=seq.seated_at - seq.arrived_at,
                prefill=seq.first_token_at - seq.seated_at,
                decode=time.monotonic() - seq.first_token_at,
            )
        self._outbox.put(seq, FinishEvent(reason, self._usage(seq), tuple(seq.calls)))

    def _fail(self, seq: Sequence, message: str) -> None:
        self._drop(seq)
        self._outbox.put(seq, ErrorEvent("internal", message))

    # -- counts

    def _report(self) -> None:
        scheduler = self._scheduler
        self._metrics.set_queue(running=len(scheduler.running), waiting=len(scheduler.waiting))
        self._metrics.set_pages(used=scheduler.pages.used, total=scheduler.pages.total)
        self._images.report()

    def check_invariants(self) -> None:
        """Raises RuntimeError unless every cache page, seat and pool row is held by exactly the requests that run. For
        tests, while the engine thread is idle or over."""
        self._scheduler.check()
        self._images.check((*self._scheduler.running, *self._scheduler.waiting))
