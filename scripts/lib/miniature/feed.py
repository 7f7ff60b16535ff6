"""Batches drawn by worker processes, handed out in order."""

import mmap
import multiprocessing
import os
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from scripts.lib.miniature.spec import Batch, Job, Miniature

_AHEAD = 3  # batches a worker that are ordered before they are needed

_drawer: Miniature


@dataclass(frozen=True)
class _Parcel:
    """A pickled batch without its arrays, which stand one after another in a file."""

    head: bytes
    sizes: list[int]
    path: str


def _start_worker(make: Callable[[str], Miniature], preset: str) -> None:
    global _drawer
    # A worker that took the accelerator would take its memory.
    jax.config.update("jax_platforms", "cpu")
    _drawer = make(preset)


def _draw(job: Job, folder: str) -> _Parcel:
    """Leaves the arrays in a file: through the pipe between processes they would take longer than a step."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(_drawer.draw(job), protocol=5, buffer_callback=buffers.append)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        sizes = [file.write(buffer.raw()) for buffer in buffers]
    return _Parcel(head, sizes, file.name)


def _open(parcel: _Parcel) -> Batch:
    """The batch, its arrays views of the mapped file, which is gone when they are."""
    with open(parcel.path, "rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    os.unlink(parcel.path)
    ends = np.cumsum(parcel.sizes)
    buffers = [mapped[end - size : end] for size, end in zip(parcel.sizes, ends, strict=True)]
    return pickle.loads(parcel.head, buffers=buffers)


class Feed:
    """Draws jobs in `workers` processes, or in this one when there are none. make(preset): makes the miniature there.

    waited: seconds that the caller of `batch` has waited for batches.
    """

    def __init__(self, make: Callable[[str], Miniature], preset: str, workers: int):
        self.waited = 0.0
        self._here = make(preset) if workers == 0 else None
        self._pool, self._folder, self.ahead = None, None, 1
        if workers:
            memory = Path("/dev/shm")
            self._folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
            self._pool = ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(make, preset),
            )
            self.ahead = _AHEAD * workers

    def _order(self, job: Job) -> "Future[_Parcel] | Batch":
        if self._pool is not None and self._folder is not None:
            return self._pool.submit(_draw, job, self._folder.name)
        assert self._here is not None
        return self._here.draw(job)

    def batches(self, jobs: Iterator[Job], reuse: int = 1) -> Iterator[tuple[Job, Batch]]:
        """The jobs' batches in order, drawn ahead. reuse: rounds that a stretch of 8 batches is gone through."""
        ordered: deque[tuple[Job, Future[_Parcel] | Batch]] = deque()
        stretch: list[tuple[Job, Batch]] = []
        for job in jobs:
            ordered.append((job, self._order(job)))
            if len(ordered) < self.ahead:
                continue
            first, future = ordered.popleft()
            stretch.append((first, self._wait(future)))
            yield stretch[-1]
            if reuse == 1:
                stretch.clear()
            elif len(stretch) == 8:
                for _ in range(reuse - 1):
                    yield from stretch
                stretch.clear()
        for job, future in ordered:
            yield job, self._wait(future)

    def _wait(self, ordered: "Future[_Parcel] | Batch") -> Batch:
        if not isinstance(ordered, Future):
            return ordered
        began = time.perf_counter()
        parcel = ordered.result()
        self.waited += time.perf_counter() - began
        return _open(parcel)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()
