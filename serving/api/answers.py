"""Answer bodies of the two routes, whole and in chunks."""

import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from serving.protocol import Usage

Kind = Literal["chat", "completion"]


@dataclass(frozen=True)
class Outcome:
    """How an answer ended."""

    reason: str
    usage: Usage
    vit_calls: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """Builds every body of one answer, so that `id`, `created` and `model` are the same on all chunks.

    `vitstripe.vit_calls` tells which calls of the vision encoder the request's images were part of: requests that share
    a number were encoded together.
    """

    kind: Kind
    id: str
    created: int
    model: str
    include_usage: bool

    @classmethod
    def begin(cls, kind: Kind, model: str, include_usage: bool) -> "Answer":
        """A new answer; its id is the request's in the engine too, so it is never one that a client chose."""
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        return cls(kind, f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, include_usage)

    def whole(self, text: str, outcome: Outcome) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text}
        choice = {"index": 0, **message, "logprobs": None, "finish_reason": outcome.reason}
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._head(name) | {
            "choices": [choice],
            "usage": usage_body(outcome.usage),
            "vitstripe": {"vit_calls": list(outcome.vit_calls)},
        }

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat names the role; a completion has none."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self.kind == "chat" else None

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}} if self.kind == "chat" else {"text": text})

    def closing(self, outcome: Outcome) -> dict[str, Any]:
        chunk = self._chunk({"delta": {}} if self.kind == "chat" else {"text": ""}, outcome.reason)
        return chunk | {"vitstripe": {"vit_calls": list(outcome.vit_calls)}}

    def totals(self, outcome: Outcome) -> dict[str, Any]:
        """The chunk after the last one that `stream_options.include_usage` asks for."""
        return self._head(self._chunk_name()) | {"choices": [], "usage": usage_body(outcome.usage)}

    def _chunk(self, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self.include_usage else {}
        return self._head(self._chunk_name()) | {"choices": [choice]} | usage

    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "image_tokens": usage.image_tokens},
    }
