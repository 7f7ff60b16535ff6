"""Counts compiles and names their cause. Before ready they are start-up; after ready each one is a fault.

Two kinds of fault are told apart. A program compiled ahead of time never compiles again: called with other arguments it
raises, and `run_compiled` says which argument changed. Anything else that compiles after ready is a jitted function
somebody forgot: `CompileGuard` logs its name, the line that called it and the argument that made it new.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.monitoring

logger = logging.getLogger("vitbatch.compile")

_EVENT = "/jax/core/compile/backend_compile_duration"
_MISS = "TRACING CACHE MISS"
_EXPLAIN = "jax_explain_cache_misses"


class ProgramMismatch(TypeError):  # noqa: N818  (named for what is wrong)
    """A compiled program was called with arguments of another shape, dtype or placement. Nothing was compiled."""


def changed_arguments(expected: Sequence[Any], actual: Sequence[Any], names: Sequence[str]) -> list[str]:
    """What differs between the arguments a program was compiled for (pytrees of ShapeDtypeStruct) and those it got,
    one text a difference: "patches: float32[2, 512, 768], compiled for uint8[2, 512, 768]"."""
    if len(expected) != len(actual):
        return [f"{len(actual)} arguments, compiled for {len(expected)}"]
    differences = []
    for name, want, got in zip(names, expected, actual, strict=True):
        wanted, found = (jax.tree_util.tree_flatten_with_path(tree) for tree in (want, got))
        if wanted[1] != found[1]:
            differences.append(f"{name}: another tree structure than it was compiled for")
            continue
        for (path, w), (_, g) in zip(wanted[0], found[0], strict=True):
            leaf = name + jax.tree_util.keystr(path)
            if (w.shape, w.dtype) != (g.shape, g.dtype):
                differences.append(f"{leaf}: {_text(g)}, compiled for {_text(w)}")
            elif isinstance(g, jax.Array) and w.sharding and not g.sharding.is_equivalent_to(w.sharding, len(w.shape)):
                differences.append(f"{leaf}: placed as {g.sharding}, compiled for {w.sharding}")
    return differences


def _text(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"


def run_compiled(
    name: str, compiled: jax.stages.Compiled, expected: Sequence[Any], names: Sequence[str], *args: Any
) -> Any:
    """compiled(*args). expected: what it was compiled for; names: of its arguments. Raises ProgramMismatch that names
    the program and every argument that differs."""
    try:
        return compiled(*args)
    except (TypeError, ValueError) as error:
        differences = changed_arguments(expected, args, names)
        if not differences:
            raise
        raise ProgramMismatch(
            f"program {name} was not compiled for these arguments: {'; '.join(differences)}. Nothing was compiled: "
            f"give it what it was warmed with"
        ) from error


class _Explanations(logging.Handler):
    """Keeps jax's account of why a function was traced anew, for the thread it happened on."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self._latest = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(_MISS):
            lines = (line.strip(" *") for line in text.splitlines()[1:])
            self._latest.text = ", ".join(line for line in lines if line)

    def take(self) -> str | None:
        text = getattr(self._latest, "text", None)
        self._latest.text = None
        return text


class _Explaining:
    """Has jax explain new traces as long as anybody wants it, whoever came or goes first; then it is as it was."""

    def __init__(self):
        self._lock, self._users, self._before = threading.Lock(), 0, False

    def begin(self) -> None:
        with self._lock:
            if not self._users:
                self._before = getattr(jax.config, _EXPLAIN)
                jax.config.update(_EXPLAIN, True)
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                jax.config.update(_EXPLAIN, self._before)


_explaining = _Explaining()


class CompileGuard:
    """Listens to jax's compile events of this process.

    on_compile: called with "before_ready" or "after_ready". Call close when it is no longer wanted. After mark_ready
    jax explains every new trace in its own log (jax_explain_cache_misses); the last guard to close undoes that.
    """

    def __init__(self, on_compile: Callable[[str], None] = lambda stage: None):
        self._on_compile = on_compile
        self._lock = threading.Lock()
        self._counts = {"before_ready": 0, "after_ready": 0}
        self._stage = "before_ready"
        self._explanations = _Explanations()
        self._explained = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
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
            # Without a new trace the arguments have the shapes and dtypes of an earlier call.
            why = self._explanations.take() or "an argument is placed on the devices in another way than before"
            name = details.get("fun_name", "a program")
            logger.error("compiled after ready: %s, %.2f s, asked for at %s: %s", name, duration_secs, where, why)

    def mark_ready(self) -> None:
        self._stage = "after_ready"
        if not self._explained:
            self._explained = True
            _explaining.begin()
            logging.getLogger("jax").addHandler(self._explanations)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
        if self._explained:
            self._explained = False
            _explaining.end()
            logging.getLogger("jax").removeHandler(self._explanations)

    @property
    def before_ready(self) -> int:
        return self._counts["before_ready"]

    @property
    def after_ready(self) -> int:
        return self._counts["after_ready"]
