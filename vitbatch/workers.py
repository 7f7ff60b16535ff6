"""A bounded pool of threads for preparing images: Pillow and numpy let other threads run while they work.

    callers            places: `limit` in all            threads
    submit, run, map --> [ running | ... | queued ] --> decode, resize, cut
         wait, in order, while all places are taken        |         ^
                                                           v         | parts of what was asked for first go first
                                                         spread: [ parts ]

What is held at any time is the work of `limit` calls, however many wait for a place. Work that spreads its parts is
done by all threads one after the other, and not by each at the same time: the first is ready as early as can be.
"""

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

_PLACES_A_THREAD = 4


class WorkersBusyError(RuntimeError):
    """No place became free in time."""


@dataclass(order=True)
class _Part:
    """order: of the work it belongs to, then of the parts in it."""

    order: tuple[int, int]
    work: Callable[[], Any] = field(compare=False)
    done: Future[Any] = field(compare=False, default_factory=Future)

    def run(self) -> None:
        try:
            self.done.set_result(self.work())
        except BaseException as error:
            self.done.set_exception(error)


class Workers:
    """Threads that prepare images, for callers in threads (`submit`, `each`) and in asyncio (`run`, `map`) alike.

    Places are given in the order they were asked for. Work that has begun holds its place until it ends, also when
    nobody waits for it any more. Of all this only `spread` may be called from the pool's own threads; they would wait
    for themselves.

        with Workers() as workers:
            images = [done.result() for done in workers.each(processor.prepare, files)]
    """

    def __init__(self, threads: int | None = None, *, limit: int | None = None, name: str = "vitbatch-images"):
        """threads: None is one a core this process may use. limit: places, running and queued; None is 4 a thread."""
        threads = usable_cores() if threads is None else threads
        limit = _PLACES_A_THREAD * threads if limit is None else limit
        if threads < 1 or limit < threads:
            raise ValueError(f"{threads} threads and {limit} places: there must be a thread, and a place for each")
        self.threads, self.limit = threads, limit
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._free = limit
        self._waiting: deque[Future[None]] = deque()
        self._closed = False
        self._orders = itertools.count()
        self._parts: list[_Part] = []
        self._running = threading.local()

    def submit(self, work: Callable[..., T], *args: object, timeout: int | float | None = None) -> Future[T]:
        """Starts or queues work; blocks the calling thread while there is no place.

        timeout: seconds to wait for a place; 0 does not wait. Raises WorkersBusyError after it, RuntimeError once
        closed.
        """
        place = self._ask()
        try:
            place.result(timeout)
        except TimeoutError:
            self._give_up(place)
            raise WorkersBusyError(
                f"all {self.limit} places were taken for {timeout:g} s; wait longer or send fewer at a time"
            ) from None
        except BaseException:
            self._give_up(place)
            raise
        return self._start(work, *args)

    def each(self, work: Callable[[S], T], items: Iterable[S]) -> Iterator[Future[T]]:
        """A finished future an item, in order: `.result()` gives the value or raises that item's own error.

        Reads at most `limit` items ahead of the caller. Leaving early drops what has not begun.
        """
        ahead: deque[Future[T]] = deque()
        try:
            for item in items:
                if len(ahead) == self.limit:
                    yield _finished(ahead.popleft())
                ahead.append(self.submit(work, item))
            while ahead:
                yield _finished(ahead.popleft())
        finally:
            for future in ahead:
                future.cancel()

    def spread(self, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Values in order, made by this thread and by every other that has nothing more urgent to do; for work that
        itself runs here, and that needs no place for its parts. Raises the error of the first item that has one, when
        no part is running any more.

        Never waits for a part that has not begun, so it ends whatever the other threads do. A part spreads nothing
        itself: parts could then wait for each other.
        """
        order: int = getattr(self._running, "order", -1)
        parts = [_Part((order, number), partial(work, item)) for number, item in enumerate(items)]
        with self._lock:
            for part in parts:
                heappush(self._parts, part)
        try:
            for _ in range(min(len(parts), self.threads) - 1):
                self._executor.submit(self._help)
        except RuntimeError:
            pass  # shut down: what has begun is finished here
        # Not what is less urgent: this thread's own work would be ready later for it.
        self._help(order)
        wait([part.done for part in parts])
        return [part.done.result() for part in parts]

    def _help(self, order: int | None = None) -> None:
        """Runs parts, the most urgent first, until all up to `order` have begun; None for all there are."""
        while True:
            with self._lock:
                if not self._parts or (order is not None and self._parts[0].order[0] > order):
                    return
                part = heappop(self._parts)
            part.run()

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """The value of one piece of work, without blocking the event loop. Cancelling drops it if it has not begun."""
        place = self._ask()
        try:
            await asyncio.wrap_future(place)
        except BaseException:
            self._give_up(place)
            raise
        return await asyncio.wrap_future(self._start(work, *args))

    async def map(self, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Values in order. When one fails its error is raised, and those that have not begun are dropped.

        For errors beside values: `asyncio.gather(*(workers.run(work, x) for x in items), return_exceptions=True)`.
        """
        tasks = [asyncio.ensure_future(self.run(work, item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def shutdown(self, wait: bool = False) -> None:
        """Drops what has not begun; those who wait for a place get a RuntimeError. wait: until running work has
        ended."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for place in waiting:
            if place.set_running_or_notify_cancel():
                place.set_exception(_closed())
        self._executor.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown(wait=True)

    def _ask(self) -> Future[None]:
        """A future that is done once its holder has a place."""
        place: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise _closed()
            if not self._free:
                self._waiting.append(place)
                return place
            self._free -= 1
        place.set_running_or_notify_cancel()
        place.set_result(None)
        return place

    def _give_up(self, place: Future[None]) -> None:
        """For a holder that was interrupted while it waited; the place may have been given to it meanwhile."""
        if not place.cancel() and place.exception() is None:
            self._leave()

    def _leave(self) -> None:
        """Hands a place to the longest waiting that still wants one."""
        with self._lock:
            while self._waiting:
                place = self._waiting.popleft()
                if place.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        place.set_result(None)

    def _start(self, work: Callable[..., T], *args: object) -> Future[T]:
        """Takes over the caller's place, and leaves it when the work has ended or was dropped."""
        try:
            future = self._executor.submit(self._run, next(self._orders), work, *args)
        except RuntimeError:
            self._leave()
            raise _closed() from None
        future.add_done_callback(lambda _: self._leave())
        return future

    def _run(self, order: int, work: Callable[..., T], *args: object) -> T:
        self._running.order = order
        return work(*args)


def usable_cores() -> int:
    """Cores this process may run on; fewer than the machine has in a container or under taskset."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _finished(future: Future[T]) -> Future[T]:
    future.exception()
    return future


def _closed() -> RuntimeError:
    return RuntimeError("the workers are shut down; make new ones")
