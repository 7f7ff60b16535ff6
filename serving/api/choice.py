"""One of the answers that a request asked for: the engine's events to what the client is shown. No waiting here."""

import time
from dataclasses import dataclass, replace
from typing import Literal

from serving.api.answers import Outcome
from serving.chat import Delta
from serving.metrics import Metrics
from serving.protocol import ErrorEvent, Event, Submission, TokenEvent, Usage
from serving.stream import AnswerStream


@dataclass(frozen=True)
class Order:
    """What one answer is made from.

    Args:
        text: reads its tokens.
        ends: tokens that end it in the engine; their text is never shown.
        score_only: nothing is generated for the client, who only asked about the prompt.
        first_of_prompt: the prompt is counted here and not at its other answers.
    """

    submission: Submission
    text: AnswerStream
    ends: frozenset[int] = frozenset()
    score_only: bool = False
    first_of_prompt: bool = True


@dataclass(frozen=True)
class Piece:
    """What choice `index` grew by: deltas of its text, and its tokens, each exactly once and not always together with
    the text they make. The last piece has the outcome."""

    index: int
    deltas: list[Delta]
    tokens: list[TokenEvent]
    outcome: Outcome | None = None


class Choice:
    """The state of one answer.

    Attributes:
        running: in the engine, as far as is known.
        outcome: how it ended; a stop string ends it before the engine knows.
        counts: of the engine, after a stop string ended the answer here: awaited for a while, then given up.
    """

    def __init__(self, index: int, order: Order, metrics: Metrics, arrived: float):
        self.index, self.id = index, order.submission.request_id
        self.first_of_prompt = order.first_of_prompt
        self._order, self._text = order, order.text
        self._metrics, self._arrived = metrics, arrived
        self._last_token: float | None = None
        self._last_id = -1
        self._deltas: list[Delta] = []
        self._tokens: list[TokenEvent] = []
        self._counted, self._closed = True, False
        self.running = False
        self.outcome: Outcome | None = None
        self.counts: Literal["open", "awaited", "given up"] = "open"
        image_tokens = sum(span.image.num_tokens for span in order.submission.images)
        self._usage, self._generated = Usage(len(order.submission.prompt_ids), 0, image_tokens), 0

    def started(self) -> None:
        """The engine took it."""
        self.running, self._counted = True, False

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return replace(self._usage, completion_tokens=self._generated)

    @property
    def over(self) -> bool:
        """Its last piece was taken."""
        return self._closed

    @property
    def reasoning_tokens(self) -> int:
        return self._text.reasoning_tokens

    def take(self, event: Event) -> None:
        """An event of the engine; no failure before the answer's end."""
        if isinstance(event, TokenEvent):
            if self.outcome is None:
                self._take_token(event)
            return
        self.running = False
        if isinstance(event, ErrorEvent):
            return
        if self.outcome is None:
            self._deltas += self._text.finish(natural=event.reason == "stop")
            reason = "stop" if self._text.stopped else event.reason
            self._generated = 0 if self._order.score_only else event.usage.completion_tokens
        else:  # a stop string ended it; the tokens of the answer are those up to it, the engine may have made more
            reason = "stop"
        self._usage = event.usage
        self.outcome = self._outcome("length" if self._order.score_only else reason, event.vit_calls)
        self.count(reason)

    def _take_token(self, event: TokenEvent) -> None:
        self._observe()
        if self._order.score_only:
            self._tokens.append(event)
            return
        self._generated += 1
        self._tokens.append(event)
        self._last_id = event.token_id
        if event.token_id not in self._order.ends:
            self._deltas += self._text.push(event.token_id)
        if self._text.stopped:
            self.outcome = self._outcome("stop")

    def _outcome(self, reason: str, vit_calls: tuple[int, ...] = ()) -> Outcome:
        """A completed call is an end of its own, if the model came to its end: "tool_calls"."""
        called = reason == "stop" and self._text.matched is None and self._text.calls > 0
        matched: str | int | None = self._text.matched
        if reason == "stop" and matched is None and self._last_id in self._order.submission.params.stop_token_ids:
            matched = self._last_id
        return Outcome("tool_calls" if called else reason, vit_calls, matched)

    def piece(self) -> Piece | None:
        """What came since the last piece; the last one once the engine's own counts are there or waited for no more."""
        last = self.outcome is not None and (self.counts == "given up" or not self.running)
        if not (self._deltas or last):
            return None
        if last:
            self._closed = True
            self.count("stop")
        piece = Piece(self.index, self._deltas, self._tokens, self.outcome if last else None)
        self._deltas, self._tokens = [], []
        return piece

    def count(self, reason: str) -> None:
        """Count it once, when it leaves the engine."""
        if not self._counted:
            self._counted = True
            self._metrics.finished(reason, seconds=time.perf_counter() - self._arrived, usage=self.usage)

    def _observe(self) -> None:
        now = time.perf_counter()
        if self._last_token is None:
            self._metrics.first_token(now - self._arrived)
        else:
            self._metrics.token_gap(now - self._last_token)
        self._last_token = now
