"""Traces of the running server by `jax.profiler`, one at a time, into a folder that the server was told."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import jax

from serving.protocol import Overloaded

_MOST_COUNTED = 100_000

logger = logging.getLogger("serving.profiling")


class ProfilerBusy(RuntimeError):  # noqa: N818 -- the caller's timing is at fault, not the profiler
    """A trace runs, or none does."""


@dataclass(frozen=True)
class TraceFile:
    """`path` is relative to the folder of traces; `bytes` is its size."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Trace:
    """A finished trace. `events` counts what each device's own timeline recorded, by its name in the trace, up to
    100,000."""

    name: str
    seconds: float
    files: tuple[TraceFile, ...]
    events: dict[str, int]


class Profiler:
    """Starts and stops traces; methods may be called from any thread, and take as long as jax does.

    Args:
        folder: traces go into folders made below it.
        limit: seconds after which a trace is stopped, as a forgotten one fills memory and disk.
        quietly: runs what it is given while the devices do nothing; raises TimeoutError or Overloaded when it does not.
            CUDA's tracer, begun amid running kernels, has ended them all with a launch failure (jax 0.11.2, H200).

    Raises:
        ValueError: the folder cannot be made, or the limit is not positive.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        limit: float = 60.0,
        quietly: Callable[[Callable[[], None]], None] = lambda work: work(),
    ):
        if not limit > 0:
            raise ValueError(f"a trace's limit is {limit} s; it must be positive")
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder}: the folder for traces cannot be made ({error.strerror})") from error
        self._limit, self._quietly = limit, quietly
        self._lock = threading.Lock()
        self._current: Path | None = None
        self._began = 0.0
        self._timer: threading.Timer | None = None

    @property
    def running(self) -> str | None:
        """The name of the trace that is being made."""
        return None if self._current is None else self._current.name

    def start(self) -> str:
        """Begins a trace and returns its name.

        Raises:
            ProfilerBusy: one runs already.
        """
        with self._lock:
            if self._current is not None:
                raise ProfilerBusy(f"trace {self._current.name} is running; stop it first")
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # following every Python call would slow the loop that is to be measured
            target = self._folder / self._name()
            try:
                self._quiet(lambda: jax.profiler.start_trace(str(target), profiler_options=options))
            except ProfilerBusy:
                raise
            except RuntimeError as error:
                raise ProfilerBusy(f"jax cannot trace now: {error}") from error
            self._current, self._began = target, time.monotonic()
            self._arm(target)
            return target.name

    def stop(self) -> Trace:
        """Ends the trace and writes it.

        Raises:
            ProfilerBusy: none runs.
        """
        with self._lock:
            if self._current is None:
                raise ProfilerBusy("no trace is running; start one first")
            return self._finish()

    def close(self) -> None:
        """Ends a trace that still runs."""
        with self._lock:
            if self._current is not None:
                try:
                    self._finish()
                except ProfilerBusy as error:
                    logger.warning("the last trace is lost: %s", error)

    def _quiet(self, work: Callable[[], None]) -> None:
        """Raises ProfilerBusy when `work` was not run, and what it raises."""
        try:
            self._quietly(work)
        except TimeoutError:
            raise ProfilerBusy("the engine did not come to the end of its step; try again later") from None
        except Overloaded as error:
            raise ProfilerBusy(str(error)) from None

    def _finish(self) -> Trace:
        """A trace that could not be ended in time runs on; one that jax cannot write is over, and told as ProfilerBusy,
        too."""
        assert self._current is not None
        target, seconds = self._current, time.monotonic() - self._began
        try:
            self._quiet(jax.profiler.stop_trace)
        except ProfilerBusy:
            raise
        except Exception as error:
            self._over()
            raise ProfilerBusy(f"trace {target.name} is lost: jax cannot write it: {error}") from error
        self._over()
        found = sorted(path for path in target.rglob("*") if path.is_file())
        files = tuple(TraceFile(str(path.relative_to(self._folder)), path.stat().st_size) for path in found)
        events: dict[str, int] = {}
        for path in found:
            if path.name.endswith(".xplane.pb"):
                events |= _device_events(path)
        return Trace(target.name, seconds, files, events)

    def _over(self) -> None:
        self._current = None
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, target: Path) -> None:
        self._timer = threading.Timer(self._limit, self._expire, [target])
        self._timer.daemon = True
        self._timer.start()

    def _expire(self, target: Path) -> None:
        with self._lock:
            if self._current == target:
                logger.warning("trace %s is to end after its limit of %g s", target.name, self._limit)
                try:
                    self._finish()
                except ProfilerBusy as error:
                    logger.warning("%s", error)
                    if self._current == target:
                        self._arm(target)

    def _name(self) -> str:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        taken = {path.name for path in self._folder.iterdir()}
        return next(name for k in range(len(taken) + 1) if (name := f"trace-{stamp}-{k}") not in taken)


def _device_events(path: Path) -> dict[str, int]:
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return {
        plane.name: sum(1 for _ in islice((event for line in plane.lines for event in line.events), _MOST_COUNTED))
        for plane in planes
        if plane.name.startswith("/device:")
    }
