"""Warm-up: every bucket compiled ahead of time, in threads, and run on every device before the first request."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from vitstripe import Program

_HIT = "/jax/compilation_cache/cache_hits"

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, program that made the last one); compiling and running are a step each."""


@dataclass(frozen=True)
class Compilation:
    """A program ready to run. lower_seconds: tracing and lowering; compile_seconds: the backend, or reading from the
    disk cache. from_disk: whether the disk cache had it."""

    program: Program
    compiled: jax.stages.Compiled
    lower_seconds: float
    compile_seconds: float
    from_disk: bool


@contextmanager
def persistent_cache(folder: str | Path | None) -> Iterator[None]:
    """JAX's persistent compilation cache in `folder`, for every program however quick to compile; None changes
    nothing. The settings are the process's: other threads that compile meanwhile use it too."""
    if folder is None:
        yield
        return
    wanted = {
        "jax_compilation_cache_dir": str(folder),
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # a cache that was opened before keeps its folder otherwise
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def compile_all(
    programs: Sequence[Program], folder: str | Path | None, on_compiled: Callable[[Compilation], None]
) -> None:
    """Lowers and compiles every program, as many at once as the machine has cores. on_compiled: called on this thread
    for each, in the order they finish. Raises what the first failing one raises; programs not begun are left."""
    from_disk = threading.local()

    def on_event(event: str, **_: object) -> None:
        if event == _HIT:
            from_disk.hit = True

    def compile_one(program: Program) -> Compilation:
        from_disk.hit = False
        begin = time.perf_counter()
        lowered = program.lower()
        middle = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(program.options) or None)
        return Compilation(program, compiled, middle - begin, time.perf_counter() - middle, from_disk.hit)

    if not programs:
        return
    jax.monitoring.register_event_listener(on_event)
    try:
        with persistent_cache(folder), ThreadPoolExecutor(min(len(programs), os.cpu_count() or 1)) as pool:
            futures = [pool.submit(compile_one, program) for program in programs]
            try:
                for future in as_completed(futures):
                    on_compiled(future.result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        jax.monitoring.unregister_event_listener(on_event)


@dataclass(frozen=True)
class BucketReport:
    """name: of the program. lanes, capacity: its shape. lower_seconds, compile_seconds: see `Compilation`, 0 when it
    was ready before. source: "compiled", "disk" or "ready"."""

    name: str
    lanes: int
    capacity: int
    lower_seconds: float
    compile_seconds: float
    run_seconds: float
    source: str


@dataclass(frozen=True)
class WarmupReport:
    """One row a bucket; `str(report)` is an aligned table. seconds: by the clock, less than the sum of the rows, since
    buckets compile side by side."""

    buckets: tuple[BucketReport, ...]
    seconds: float

    def __str__(self) -> str:
        rows = [("program", "source", "lanes", "patches", "lower s", "compile s", "run s")]
        rows += [
            (
                b.name,
                b.source,
                str(b.lanes),
                str(b.lanes * b.capacity),
                f"{b.lower_seconds:.2f}",
                f"{b.compile_seconds:.2f}",
                f"{b.run_seconds:.3f}",
            )
            for b in self.buckets
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join([*(_align(row, widths) for row in rows), f"{self.seconds:.1f} s in all"])


def _align(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = row
    return "  ".join([name.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))])
