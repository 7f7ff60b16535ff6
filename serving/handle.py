"""The engine as the HTTP side knows it from the first second, before there is one."""

import threading
from collections.abc import Callable
from typing import TypeVar

from serving.engine import Engine
from serving.protocol import EngineState, Event, Health, Overloaded, Submission

T = TypeVar("T")


class EngineHandle:
    """Implements EngineClient: "starting" until an engine is set, then that engine."""

    def __init__(self, *, model_name: str, max_model_len: int, eos_ids: frozenset[int]):
        self._name, self._limit, self._eos = model_name, max_model_len, eos_ids
        self._engine: Engine | None = None
        self._state: EngineState = "starting"
        self._detail = "loading"
        self._lock = threading.Lock()

    @property
    def max_model_len(self) -> int:
        return self._limit

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos

    def set_detail(self, detail: str) -> None:
        self._detail = detail

    def set_engine(self, engine: Engine) -> None:
        """From now on requests go to `engine`, which is started here."""
        with self._lock:
            if self._state == "starting":
                engine.start()
                self._engine = engine

    def fail(self, detail: str) -> None:
        self._state, self._detail = "dead", detail

    def drain(self, timeout: float) -> int:
        """Takes no more requests and lets the running ones end. Those that have not after `timeout` seconds get an
        error event; returns how many that were."""
        with self._lock:
            if self._state == "starting":
                self._state, self._detail = "draining", "shutting down"
            engine = self._engine
        if engine is None or engine.drain(timeout):
            return 0
        return engine.stop("shut down")

    def is_computing(self) -> bool:
        """Whether the engine's thread is still in a step."""
        return self._engine is not None and self._engine.is_alive()

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> None:
        if self._engine is None:
            raise Overloaded(f"the server is {self._state}: {self._detail}", retry_after=5.0)
        self._engine.submit(submission, on_event)

    def abort(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.abort(request_id)

    def between_steps(self, work: Callable[[], T]) -> T:
        """See Engine.between_steps. Raises Overloaded while there is no engine: the devices then warm up."""
        if self._engine is None:
            raise Overloaded(f"the server is {self._state}: {self._detail}", retry_after=5.0)
        return self._engine.between_steps(work)

    def health(self) -> Health:
        if self._engine is not None:
            return self._engine.health()
        return Health(self._state, 0.0, self._detail)
