"""uvicorn's HTTP/1.1 with bounds on what a client may do before it has sent a request."""

import asyncio

import h11
from starlette.applications import Starlette
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.api.limits import Limits

_PIECE = 4096


def server_config(app: Starlette, limits: Limits) -> Config:
    """A uvicorn configuration with `limits.max_header_bytes` and `limits.header_seconds` in force. Its loggers are the
    program's own, and what asks for websockets is answered as plain HTTP."""

    class BoundedH11(_BoundedH11):
        header_seconds = limits.header_seconds

    return Config(
        app,
        http=BoundedH11,
        ws="none",
        h11_max_incomplete_event_size=limits.max_header_bytes,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )


class _BoundedH11(H11Protocol):
    """Closes a connection whose client takes too long over the head of a request, or over a body that was answered
    before it had come.

    header_seconds: for the request line and all headers, from the first byte or, on a new connection, from its start;
        for the rest of a body, from its first byte after the answer.
    """

    header_seconds: float
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, *args: object, **kwargs: object):
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        # h11 measures a head that is not complete yet, so one that came in a single read would pass at any size.
        while data and not self.transport.is_closing():
            size = _PIECE if self.conn.their_state is h11.IDLE else len(data)
            super().data_received(data[:size])
            data = data[size:]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Runs the clock while a head is awaited or has begun, and while what comes is of no use any more."""
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
