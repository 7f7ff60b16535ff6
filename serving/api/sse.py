"""Server-sent events, and work that ends when its client goes away."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.errors import Disconnected

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes an encoder a call


def event(body: dict[str, Any]) -> bytes:
    """One event. JSON has no bare newline, so one data line is enough."""
    return b"data: " + _encode(body).encode() + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects.

    To be called after the whole body was read: from then on `receive` only returns for a disconnect. Nothing here has a
    time limit, so a slow reader is never taken for a lost one; the listener cuts off who takes nothing at all.

    Raises:
        Disconnected: the client went away first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for pending in (task, watch):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError):
                    await pending


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: encoded events; it is closed whatever happens.
        close: called once at the end, also when the stream was never begun.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for encoded in events:
                await send({"type": "http.response.body", "body": encoded, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
