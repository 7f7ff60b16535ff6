"""Request bodies and the bounded worker threads that turn them into prompts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from serving.api.errors import ApiError, invalid, unavailable
from serving.api.limits import Limits

S = TypeVar("S")
T = TypeVar("T")


class Intake:
    """Reads bodies within a limit each and a limit for all that are held at one time."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._held = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes count as held until the context is left.

        Raises:
            ApiError: 400 for another media type than JSON, 413 too large, 415 compressed, 503 too much is held already.
        """
        self._check_headers(request)
        held = 0
        chunks: list[bytes] = []
        try:
            async for chunk in request.stream():
                held += len(chunk)
                self._held += len(chunk)
                if held > self._limits.max_body_bytes:
                    raise self._too_large(f"more than {self._limits.max_body_bytes}")
                if self._held > self._limits.max_preparing_bytes:
                    raise unavailable("too many large requests are being prepared; try again soon")
                chunks.append(chunk)
            yield b"".join(chunks)
        finally:
            self._held -= held

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


class Workers:
    """A fixed number of threads. Work that was begun for a client that left still counts against the number."""

    def __init__(self, threads: int, name: str):
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    async def map(self, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Results in order. When one fails, those that were not begun are dropped."""
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(self._executor, work, item) for item in items]
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
