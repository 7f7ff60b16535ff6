"""Counts compiles. Before ready they are start-up; after ready each one is a fault."""

import logging
import threading
import traceback
from collections.abc import Callable

import jax.monitoring

logger = logging.getLogger("serving.compile")

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileGuard:
    """Listens to jax's compile events of this process.

    on_compile: called with "before_ready" or "after_ready". Call close when it is no longer wanted.
    """

    def __init__(self, on_compile: Callable[[str], None] = lambda stage: None):
        self._on_compile = on_compile
        self._lock = threading.Lock()
        self._counts = {"before_ready": 0, "after_ready": 0}
        self._stage = "before_ready"
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        stage = self._stage
        if event != _EVENT:
            return
        with self._lock:
            self._counts[stage] += 1
        self._on_compile(stage)
        if stage == "after_ready":
            # The caller is on this thread's stack: name the line of ours that asked for the program.
            ours = [f for f in traceback.extract_stack() if "site-packages" not in f.filename]
            where = f"{ours[-2].filename}:{ours[-2].lineno} {ours[-2].name}" if len(ours) > 1 else "unknown"
            logger.error("compiled after ready: %.2f s, asked for at %s", duration_secs, where)

    def mark_ready(self) -> None:
        self._stage = "after_ready"

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @property
    def before_ready(self) -> int:
        return self._counts["before_ready"]

    @property
    def after_ready(self) -> int:
        return self._counts["after_ready"]
