"""What a request may cost before the engine sees it."""

import math
from dataclasses import dataclass, field, fields

from vitbatch.workers import usable_cores

KIB = 1 << 10
MIB = 1 << 20

_MOST_IMAGE_WORKERS = 16
"""Nothing was measured with more; threads take turns at Python, and the engine's wants its own."""


@dataclass(frozen=True)
class Limits:
    """Limits of the HTTP side.

    Args:
        max_body_bytes: of one request body; more is a 413.
        max_body_values: commas, quotes and opening brackets and braces of a body. There are as many as its JSON has
            values and names or more; these are what reading it takes memory and time for, not its bytes.
        max_preparing_bytes: of all bodies and fetched images that are being read and prepared at one time; more is a
            429.
        max_preparing: requests that are being read and prepared at one time; more is a 429.
        max_header_bytes: of a request's line and headers; more is a 400.
        header_seconds: that a client has for a request's line and headers, from the moment it connects.
        body_seconds: that a client has for a request's body; more is a 408.
        unread_seconds: that a client may take nothing of what waits for it. Looked at in steps of as long: after
            once to twice that it is cut off, and what runs for it ends. Who takes a little now and then is not.
        max_images: images a request.
        max_image_bytes: of one encoded image.
        max_image_pixels: of one image, as its header says.
        max_request_pixels: of all images of a request, as their headers say.
        max_decoding_pixels: of all images that are decoded and resized at one time, each of about 4 bytes, or
            12 with transparency; further images wait. One alone may have more.
        max_messages: messages a chat.
        max_text_chars: characters of a whole prompt; bounds the time spent on reading and rendering it. What is far
            over the context is not tokenised.
        max_prompts: prompts a completion.
        max_stop: stop strings a request.
        max_stop_chars: of one stop string.
        max_stop_token_ids: ids a request that end its answers.
        max_logit_bias: tokens a request whose logits it changes.
        max_echo_logprobs: log-probabilities a request that are told of its echoed prompts: a token's own and its
            alternatives', in each answer. A few bytes of prompt are kilobytes of them.
        text_workers: threads that parse bodies, render templates and tokenise.
        image_workers: threads that decode and resize images; by default one a core this process may use, 16 at most.
        heartbeat_seconds: an engine that showed no sign of life for longer counts as dead.
        watch_seconds: how often a waiting request looks whether the engine is still alive.
        probe_seconds: how long /health_generate waits for its token.
        abort_seconds: how long an answer that a stop string ended waits for the engine's own counts.

    Raises:
        ValueError: a limit is not a positive number.
    """

    max_body_bytes: int = 32 * MIB
    max_body_values: int = 1_000_000
    max_preparing_bytes: int = 1024 * MIB
    max_preparing: int = 1024
    max_header_bytes: int = 64 * KIB
    header_seconds: float = 20.0
    body_seconds: float = 120.0
    unread_seconds: float = 60.0
    max_images: int = 8
    max_image_bytes: int = 20 * MIB
    max_image_pixels: int = 64_000_000
    max_request_pixels: int = 128_000_000
    max_decoding_pixels: int = 256_000_000
    max_messages: int = 2048
    max_text_chars: int = 4_000_000
    max_prompts: int = 128
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    max_echo_logprobs: int = 1_000_000
    text_workers: int = 2
    image_workers: int = field(default_factory=lambda: min(usable_cores(), _MOST_IMAGE_WORKERS))
    heartbeat_seconds: float = 120.0
    watch_seconds: float = 2.0
    probe_seconds: float = 30.0
    abort_seconds: float = 2.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{limit.name} is {value}; it must be a positive number")
        if self.max_preparing_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_preparing_bytes is {self.max_preparing_bytes}, less than one body of max_body_bytes "
                f"({self.max_body_bytes}); raise it"
            )
