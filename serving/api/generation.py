"""One request in the engine: events from its thread become text on the event loop."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from serving.api.answers import Outcome
from serving.api.errors import ApiError, internal, invalid, overloaded, unavailable
from serving.api.limits import Limits
from serving.metrics import Metrics
from serving.protocol import (
    EngineClient,
    ErrorEvent,
    Event,
    FinishEvent,
    Health,
    InvalidRequest,
    Overloaded,
    Submission,
    TokenEvent,
    Usage,
)
from serving.stream import TextStream

logger = logging.getLogger(__name__)


def is_alive(health: Health, limits: Limits) -> bool:
    return health.state != "dead" and health.heartbeat_age <= limits.heartbeat_seconds


class Generation:
    """Submits a request and gives its text piece by piece.

    `close` must be called at the end, whatever happened: it aborts what is still running, so that no request goes on
    for a client that left.

    Attributes:
        outcome: how the answer ended, once `pieces` is exhausted.
        usage: token counts so far.
    """

    def __init__(
        self,
        engine: EngineClient,
        submission: Submission,
        text: TextStream,
        *,
        limits: Limits,
        metrics: Metrics,
        trace_id: str,
        arrived: float,
    ):
        self._engine = engine
        self._id = submission.request_id
        self._text = text
        self._limits = limits
        self._metrics = metrics
        self._trace_id = trace_id
        self._arrived = arrived
        self._last_token: float | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._first: Event | None = None
        self._failure: ApiError | None = None
        self._running = False  # in the engine, as far as we know
        self._counted = True
        self.outcome: Outcome | None = None
        image_tokens = sum(span.image.num_tokens for span in submission.images)
        self.usage = Usage(len(submission.prompt_ids), 0, image_tokens)
        self._submission: Submission | None = submission

    async def begin(self) -> None:
        """Submit, and wait for the first event, so that an early failure still gets its own status.

        Raises:
            ApiError: the engine refused the request or failed on it.
        """
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to read, and the engine must go on
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        assert self._submission is not None, "begin is called once"
        submission, self._submission = self._submission, None
        try:
            self._engine.submit(submission, deliver)
        except InvalidRequest as error:
            raise invalid(str(error)) from None
        except Overloaded as error:
            raise overloaded(error) from None
        self._running, self._counted = True, False
        self._first = await self._next()
        failure = self._failure_of(self._first)
        if failure is not None:
            self._end("error")
            raise failure

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The visible text. Tokens that came while the client was slow are joined into one piece.

        Raises:
            ApiError: the engine failed after it had begun.
        """
        event, self._first = self._first, None
        while self.outcome is None:
            text = self._take(event if event is not None else await self._next())
            event = None
            while self.outcome is None and self._failure is None and not self._events.empty():
                text += self._take(self._events.get_nowait())
            if text:
                yield text
            if self._failure is not None:
                raise self._failure
            if self._text.stopped:
                await self._settle()

    def close(self) -> None:
        if self._running:
            self._running = False
            self._engine.abort(self._id)
        self._end("abort")

    def _take(self, event: Event) -> str:
        """The text that an event adds."""
        if isinstance(event, TokenEvent):
            self._observe_token()
            text = self._text.push(event.token_id)
            if self._text.stopped:
                self._engine.abort(self._id)
                self.outcome = Outcome("stop", self.usage, ())
            return text
        self._running = False
        self._failure = self._failure_of(event)
        if self._failure is not None:
            self._end("error")
            return ""
        assert isinstance(event, FinishEvent)
        text = self._text.finish()
        self.usage = event.usage
        self.outcome = Outcome("stop" if self._text.stopped else event.reason, event.usage, event.vit_calls)
        self._end(self.outcome.reason)
        return text

    async def _settle(self) -> None:
        """After a stop string: take the engine's own counts from its last event, if it comes soon.

        The tokens of the answer are those up to the stop string; the engine may have made some more.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.abort_seconds):
                while self._running:
                    event = await self._events.get()
                    if isinstance(event, FinishEvent):
                        self.usage = replace(event.usage, completion_tokens=self.usage.completion_tokens)
                        self.outcome = Outcome("stop", self.usage, event.vit_calls)
                    self._running = isinstance(event, TokenEvent)
        self._end("stop")

    async def _next(self) -> Event:
        while True:
            try:
                async with asyncio.timeout(self._limits.watch_seconds):
                    return await self._events.get()
            except TimeoutError:
                health = self._engine.health()
                if not is_alive(health, self._limits):
                    logger.error("request %s: the engine is gone (%s)", self._trace_id, health.detail)
                    self._end("error")
                    raise unavailable("the engine stopped before the answer was done", retry_after=30.0) from None

    def _failure_of(self, event: Event) -> ApiError | None:
        if isinstance(event, ErrorEvent):
            self._running = False
            if event.kind == "invalid":
                return invalid(event.message)
            if event.kind == "overloaded":
                return unavailable(event.message)
            logger.error("request %s: engine error: %s", self._trace_id, event.message)
            return internal(self._trace_id)
        if isinstance(event, FinishEvent) and event.reason == "abort":
            self._running = False
            return unavailable("the server ended this request before it was done; send it again")
        return None

    def _observe_token(self) -> None:
        now = time.perf_counter()
        if self._last_token is None:
            self._metrics.first_token(now - self._arrived)
        else:
            self._metrics.token_gap(now - self._last_token)
        self._last_token = now
        self.usage = replace(self.usage, completion_tokens=self.usage.completion_tokens + 1)

    def _end(self, reason: str) -> None:
        """Count the request once."""
        if not self._counted:
            self._counted = True
            self._metrics.finished(reason, seconds=time.perf_counter() - self._arrived, usage=self.usage)
