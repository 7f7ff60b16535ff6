"""uvicorn's HTTP/1.1 with bounds on what a client may do before it has sent a request and after it was answered."""

import asyncio
import logging

import h11
from starlette.applications import Starlette
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.api.limits import Limits

logger = logging.getLogger(__name__)

_PIECE = 4096


def server_config(app: Starlette, limits: Limits) -> Config:
    """A uvicorn configuration with `limits.max_header_bytes`, `limits.header_seconds` and `limits.unread_seconds` in
    force. Its loggers are the program's own, and what asks for websockets is answered as plain HTTP."""

    class BoundedH11(_BoundedH11):
        header_seconds = limits.header_seconds
        unread_seconds = limits.unread_seconds

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
    before it had come, and one whose client takes nothing of its answer.

    header_seconds: for the request line and all headers, from the first byte or, on a new connection, from its start;
        for the rest of a body, from its first byte after the answer.
    unread_seconds: without a byte taken of those that wait. While any wait, an answer's next piece is not made.
    """

    header_seconds: float
    unread_seconds: float
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, *args: object, **kwargs: object):
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        # The system's own buffers are large; what is over them counts from the first byte.
        transport.set_write_buffer_limits(0)
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
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def _look_again(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.unread_seconds, self._look, waiting)

    def _look(self, before: int) -> None:
        """before: bytes that waited at the last look; more do not come while some wait."""
        waiting = self.transport.get_write_buffer_size()
        if waiting < before:
            return self._look_again()
        logger.warning(
            "a client took nothing for %g s while %d bytes waited for it: it is cut off", self.unread_seconds, waiting
        )
        return self.transport.abort()  # to close would wait for those bytes

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
