"""Request bodies and the bounded worker threads that turn them into prompts."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from starlette.requests import Request

from serving.api.errors import ApiError, invalid, overloaded
from serving.api.limits import Limits
from serving.protocol import Overloaded
from vitbatch import workers as pools

S = TypeVar("S")
T = TypeVar("T")


class Intake:
    """Reads bodies within a limit each, and limits for all that are held at one time."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._held = 0
        self._bodies = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """A function that counts bytes as held, until the context is left.

        Raises:
            ApiError: from the function: 429, too much is held already.
        """
        held = 0

        def more(size: int) -> None:
            nonlocal held
            held += size
            self._held += size
            if self._held > self._limits.max_preparing_bytes:
                raise _full("requests that are being prepared hold too much; try again soon")

        try:
            yield more
        finally:
            self._held -= held

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes count as held until the context is left.

        Raises:
            ApiError: 400 for another media type than JSON, 408 too slow, 413 too large, 415 compressed, 429 too much
                is held already.
        """
        self._check_headers(request)
        if self._bodies >= self._limits.max_preparing:
            raise _full(f"{self._bodies} requests are being prepared; try again soon")
        self._bodies += 1
        try:
            with self.hold() as hold:
                yield await self._read(request, hold)
        finally:
            self._bodies -= 1

    async def _read(self, request: Request, hold: Callable[[int], None]) -> bytes:
        size, chunks = 0, []
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > self._limits.max_body_bytes:
                        raise self._too_large(f"more than {self._limits.max_body_bytes}")
                    hold(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._limits.body_seconds:g} s") from None
        return b"".join(chunks)

    def _check_headers(self, request: Request) -> None:
        media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media_type != "application/json":
            raise invalid("the body must be JSON; send the header Content-Type: application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "compressed bodies are not accepted; send the JSON as it is")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._limits.max_body_bytes:
            raise self._too_large(length[:20])

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"body of {size} bytes: the limit is {self._limits.max_body_bytes}; send fewer or smaller images",
            code="body_too_large",
        )


def _full(message: str) -> ApiError:
    return overloaded(Overloaded(message, reason="queue_full"))


class Workers:
    """A fixed number of threads. Work that was begun for a client that left still counts against the number.

    spread: see `vitbatch.Workers.spread`; for work that runs here.
    """

    def __init__(self, threads: int, name: str):
        # A place for everybody: what waits is bounded in bytes, where bodies are read.
        self._pool = pools.Workers(threads, limit=sys.maxsize, name=name)
        self.spread = self._pool.spread

    async def run(self, work: Callable[..., T], *args: object) -> T:
        [result] = await self.map(lambda given: work(*given), [args])
        return result

    async def map(self, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Results in order. When one fails, or the caller is cancelled, those that were not begun are dropped."""
        # The pool keeps what it was given until a thread comes to it, dropped or not. Items are large, so it is
        # given boxes that can be emptied.
        boxes = [[item] for item in items]
        futures = [asyncio.wrap_future(self._pool.submit(_contained, work, box)) for box in boxes]
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future, box in zip(futures, boxes, strict=True):
                future.cancel()
                box.clear()

    def shutdown(self) -> None:
        self._pool.shutdown()


def _contained(work: Callable[[S], T], box: list[S]) -> T:
    """`work` on what is in the box, and its worst end is an ordinary error of this one request.

    A SystemExit would end the event loop that awaits it, and a StopIteration cannot be handed to it at all.
    """
    try:
        return work(box.pop())
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(f"a worker ended with {type(error).__name__}") from error
