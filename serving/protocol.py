"""What the HTTP side and the engine say to each other.

Plain dataclasses; nothing here imports jax. The HTTP side submits tokens and prepared images, the engine answers with
events through a callback that it calls from its own thread.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

EngineState = Literal["starting", "ready", "draining", "dead"]
FinishReason = Literal["stop", "length", "abort"]
ErrorKind = Literal["invalid", "overloaded", "internal"]

MAX_TEMPERATURE = 2.0
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class InvalidRequest(ValueError):  # noqa: N818 -- part of the contract between the two sides
    """A fault of the request itself; the text is shown to the client."""


class Overloaded(RuntimeError):  # noqa: N818 -- part of the contract between the two sides
    """The engine takes no more requests now.

    Attributes:
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


if TYPE_CHECKING:
    from vitbatch import PreparedImage
else:

    @runtime_checkable
    class PreparedImage(Protocol):
        """What both sides read of a `vitbatch.PreparedImage`. Importing that one at run time would bring jax along."""

        num_tokens: int
        grid_thw: tuple[int, int, int]
        key: bytes


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is drawn.

    Args:
        max_tokens: tokens to generate at most, at least 1.
        temperature: 0 (greedy) to 2.
        top_p: nucleus mass, 0 (only the best token) to 1 (off).
        seed: any signed 64-bit integer; None draws one.
        ignore_eos: go on to `max_tokens` whatever is sampled.

    Raises:
        InvalidRequest: a value is out of its range or not finite.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= MAX_TEMPERATURE):
            raise InvalidRequest(f"temperature is {self.temperature}; it must be from 0 to {MAX_TEMPERATURE:g}")
        if not (math.isfinite(self.top_p) and 0.0 <= self.top_p <= 1.0):
            raise InvalidRequest(f"top_p is {self.top_p}; it must be from 0 to 1")
        if self.seed is not None and not _INT64_MIN <= self.seed <= _INT64_MAX:
            raise InvalidRequest(f"seed is {self.seed}; it must fit a signed 64-bit integer")


@dataclass(frozen=True)
class ImageSpan:
    """Where one image sits in a prompt: its placeholders are tokens [start, start + image.num_tokens)."""

    start: int
    image: PreparedImage

    @property
    def stop(self) -> int:
        return self.start + self.image.num_tokens


@dataclass
class Submission:
    """One request for the engine. `images` is in prompt order and its spans do not overlap."""

    request_id: str
    prompt_ids: list[int]
    images: tuple[ImageSpan, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `prompt_tokens` counts image tokens too."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token. The token that ends an answer (eos) is sent too, right before its FinishEvent."""

    token_id: int


@dataclass(frozen=True)
class FinishEvent:
    """The last event of a request that ended in order.

    `vit_calls` are the numbers of the vision-encoder calls that encoded its images; empty when all came from the cache.
    """

    reason: FinishReason
    usage: Usage
    vit_calls: tuple[int, ...]


@dataclass(frozen=True)
class ErrorEvent:
    """The last event of a request that failed. `message` is shown to the client unless kind is "internal"."""

    kind: ErrorKind
    message: str


Event = TokenEvent | FinishEvent | ErrorEvent


@dataclass(frozen=True)
class Health:
    """The engine's state; `heartbeat_age` is seconds since its thread last showed a sign of life."""

    state: EngineState
    heartbeat_age: float
    detail: str


@runtime_checkable
class EngineClient(Protocol):
    """The engine, as the HTTP side sees it. Every method may be called from any thread and returns at once."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> None:
        """Queue a request.

        `on_event` is called from the engine thread, in order, up to and including one FinishEvent or ErrorEvent.

        Raises:
            InvalidRequest: the request can never be served.
            Overloaded: the queue is full, or the engine is not taking requests.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request, which then ends with FinishEvent("abort"). One that is unknown or already over is ignored."""
        ...

    def health(self) -> Health: ...
