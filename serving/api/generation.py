"""A request's answers in the engine: events from its thread become pieces of answers on the event loop."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from serving.api.choice import Choice, Order, Piece
from serving.api.errors import ApiError, internal, invalid, overloaded, unavailable
from serving.api.limits import Limits
from serving.api.mailbox import Mailbox
from serving.chat.deltas import joined
from serving.metrics import Metrics
from serving.protocol import (
    EngineClient,
    ErrorEvent,
    Event,
    FinishEvent,
    Health,
    InvalidRequest,
    Overloaded,
    Usage,
)

logger = logging.getLogger(__name__)


def is_alive(health: Health, limits: Limits) -> bool:
    return health.state != "dead" and health.heartbeat_age <= limits.heartbeat_seconds


class Generation:
    """Submits the answers of one request and gives them piece by piece.

    `close` must be called at the end, whatever happened: it aborts what is still running, so that no answer goes on
    for a client that left. A failure of one answer fails the request.
    """

    def __init__(
        self,
        engine: EngineClient,
        orders: Sequence[Order],
        *,
        limits: Limits,
        metrics: Metrics,
        trace_id: str,
        arrived: float,
    ):
        self._engine = engine
        self._limits = limits
        self._trace_id = trace_id
        self._choices = [Choice(k, order, metrics, arrived) for k, order in enumerate(orders)]
        self._submissions = [order.submission for order in orders]
        # None: time to look around.
        self._events: asyncio.Queue[tuple[Choice, Event] | None] = asyncio.Queue()
        self._watch: asyncio.TimerHandle | None = None
        self._failure: ApiError | None = None

    @property
    def usage(self) -> Usage:
        """Token counts so far; a prompt counts once however many answers it has."""
        firsts = [choice.usage for choice in self._choices if choice.first_of_prompt]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            completion_tokens=sum(choice.usage.completion_tokens for choice in self._choices),
            image_tokens=sum(usage.image_tokens for usage in firsts),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
        )

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self._choices)

    @property
    def reasons(self) -> list[str]:
        """How each answer ended."""
        return [choice.outcome.reason if choice.outcome else "unfinished" for choice in self._choices]

    async def begin(self) -> None:
        """Submit, and wait for the first event, so that an early failure still gets its own status.

        Raises:
            ApiError: the engine refused the request or failed on it.
        """
        assert self._submissions, "begin is called once"
        submissions, self._submissions = self._submissions, []
        try:
            for choice, submission in zip(self._choices, submissions, strict=True):
                self._engine.submit(submission, self._delivery(choice))
                choice.started()
        except InvalidRequest as error:
            raise invalid(str(error)) from None
        except Overloaded as error:
            raise overloaded(error) from None
        self._watch_next()
        while (told := await self._next()) is None:
            pass
        self._take(told)
        if self._failure is not None:
            raise self._failure

    def _delivery(self, choice: Choice) -> Callable[[Event], None]:
        post, put = Mailbox.of_running_loop().post, self._events.put_nowait
        return lambda event: post(put, (choice, event))

    def _look(self) -> None:
        """Has the engine looked at, now and every `watch_seconds` from now on, if nothing comes from it."""
        if self._events.empty():
            self._events.put_nowait(None)
        self._watch_next()

    def _watch_next(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(self._limits.watch_seconds, self._look)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What the answers grow by, in the order in which it comes; answers are told apart by their index. What came
        while the client was slow is joined into one piece.

        Raises:
            ApiError: the engine failed after it had begun.
        """
        while True:
            while self._failure is None and not self._events.empty():
                if (told := self._events.get_nowait()) is not None:
                    self._take(told)
            for choice in self._choices:
                piece = None if choice.over else choice.piece()
                if piece is not None:
                    yield Piece(piece.index, joined(piece.deltas), piece.tokens, piece.outcome)
            if self._failure is not None:
                raise self._failure
            if all(choice.over for choice in self._choices):
                return
            if (told := await self._next()) is not None:
                self._take(told)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for choice in self._choices:
            if choice.running:
                choice.running = False
                self._engine.abort(choice.id)
            choice.count("abort")

    async def _next(self) -> tuple[Choice, Event] | None:
        """The next event, or None: time to look around. Raises ApiError when the engine is gone and nothing that it
        told is left to read: a complete answer must reach a client that reads slowly."""
        told = await self._events.get()
        if told is None and self._events.empty():
            self._check_engine()
        return told

    def _take(self, told: tuple[Choice, Event]) -> None:
        choice, event = told
        self._failure = None if choice.outcome is not None else self._failure_of(event)
        if self._failure is not None:
            choice.running = False
            choice.count("error")
            return
        choice.take(event)
        if choice.outcome is not None and choice.running and choice.counts == "open":
            # A stop string ended it. The engine's own counts come with its last event, if that comes soon.
            choice.counts = "awaited"
            asyncio.get_running_loop().call_later(self._limits.abort_seconds, self._settle, choice)
            self._engine.abort(choice.id)

    def _settle(self, choice: Choice) -> None:
        choice.counts = "given up"
        self._events.put_nowait(None)

    def _check_engine(self) -> None:
        health = self._engine.health()
        if not is_alive(health, self._limits):
            logger.error("request %s: the engine is gone (%s)", self._trace_id, health.detail)
            for choice in self._choices:
                choice.count("error")
            raise unavailable("the engine stopped before the answer was done", retry_after=30.0)

    def _failure_of(self, event: Event) -> ApiError | None:
        if isinstance(event, ErrorEvent):
            if event.kind == "invalid":
                return invalid(event.message)
            if event.kind == "overloaded":
                return unavailable(event.message)
            logger.error("request %s: engine error: %s", self._trace_id, event.message)
            return internal(self._trace_id)
        if isinstance(event, FinishEvent) and event.reason == "abort":
            return unavailable("the server ended this request before it was done; send it again")
        return None
