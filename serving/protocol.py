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
Refusal = Literal["queue_full", "unavailable"]

MAX_TEMPERATURE = 2.0
LEAST_REPETITION = 0.01
"""Of a repetition penalty: logits divided by less may overflow."""
MAX_LOGPROBS = 20
"""Most alternatives a token's log-probabilities are told for; the device program's outputs have room for so many."""
MAX_CHOICES = 8
MAX_BIAS = 100.0
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class InvalidRequest(ValueError):  # noqa: N818 -- part of the contract between the two sides
    """A fault of the request itself; the text is shown to the client."""


class Overloaded(RuntimeError):  # noqa: N818 -- part of the contract between the two sides
    """The engine takes no more requests now.

    Attributes:
        retry_after: seconds after which trying again makes sense.
        reason: "queue_full" when there is too much to do, "unavailable" while the server starts, drains or is dead.
    """

    def __init__(self, message: str, retry_after: float = 1.0, reason: Refusal = "unavailable"):
        super().__init__(message)
        self.retry_after, self.reason = retry_after, reason


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
    """How one answer is drawn; serving.sampling says in which order the settings act.

    Args:
        max_tokens: tokens to generate at most, at least 1.
        temperature: 0 (greedy) to 2.
        top_p: nucleus mass, 0 (only the best token) to 1 (off).
        seed: any signed 64-bit integer; None draws one.
        ignore_eos: go on to `max_tokens` whatever is sampled; `stop_token_ids` still end the answer.
        top_k: only the k best tokens; 0 is off.
        min_p: only tokens at least this share as likely as the best one, 0 (off) to 1.
        presence_penalty: taken off the logit of every token generated before, -2 to 2.
        frequency_penalty: taken off it once for each time it was generated, -2 to 2.
        repetition_penalty: divides the positive and multiplies the negative logits of the tokens of the prompt and of
            the answer, 0.01 (where no logit overflows) to 2; 1 is off.
        logit_bias: (token id, -100 to 100) pairs, added to the logits.
        min_tokens: tokens before which neither eos nor `stop_token_ids` can be sampled.
        stop_token_ids: further ids that end the answer.
        logprobs: alternatives to tell with each token, 0 (only the token itself) to 20; None tells nothing.
        prompt_logprobs: the same for the tokens of the prompt.

    Raises:
        InvalidRequest: a value is out of its range or not finite. The text begins with the field's name.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}; it must be at least 1")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} is {value}; it must be from {low:g} to {high:g}")
        if self.seed is not None and not _INT64_MIN <= self.seed <= _INT64_MAX:
            raise InvalidRequest(f"seed is {self.seed}; it must fit a signed 64-bit integer")
        if not 0 <= self.top_k < 1 << 31:
            raise InvalidRequest(f"top_k is {self.top_k}; it must be 0 (off) or the number of tokens to keep")
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not abs(bias) <= MAX_BIAS:
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is {bias}; ids are not negative, values from -100 to 100"
                )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens, which is {self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name} is {value}; it must be from 0 to {MAX_LOGPROBS}")

    @property
    def shapes_logits(self) -> bool:
        """Whether logits depend on something that is kept for the request on the device (serving.sampling.Seats)."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
        )


_RANGES = (
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", LEAST_REPETITION, 2.0),
)


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
    """One request for the engine. `images` is in prompt order and its spans do not overlap. Only requests with the same
    `cache_salt` share cached prefixes."""

    request_id: str
    prompt_ids: list[int]
    images: tuple[ImageSpan, ...]
    params: SamplingParams
    cache_salt: str = ""


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `prompt_tokens` counts image tokens too."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one token and of the best ones in its place, best first, by the model alone: log-softmax of
    its float32 logits before bias, penalties and temperature. Not more alternatives than were asked for. A chosen
    token that is among them has the very same value there."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token. The token that ends an answer (eos) is sent too, right before its FinishEvent.

    `logprobs` is set where the request asked for it. `prompt` comes with the first token of a request that asked for
    `prompt_logprobs`: one entry for each prompt token but the first, which nothing precedes.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt: tuple[TokenLogprobs, ...] | None = None


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
