"""Answer bodies of the two routes, whole and in chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serving.chat import CallArguments, CallStart, Delta, Message, Text
from serving.protocol import Usage

Kind = Literal["chat", "completion"]


@dataclass(frozen=True)
class Outcome:
    """How an answer ended. `matched` is the stop string or the id of `stop_token_ids` that ended it."""

    reason: str
    vit_calls: tuple[int, ...]
    matched: str | int | None = None


@dataclass(frozen=True)
class Totals:
    """Counts of a whole request; `reasoning_tokens` are part of the completion tokens."""

    usage: Usage
    reasoning_tokens: int


@dataclass(frozen=True)
class Whole:
    """One choice of an answer that is not streamed."""

    message: Message
    outcome: Outcome
    logprobs: dict[str, Any] | None


@dataclass(frozen=True)
class Answer:
    """Builds every body of one request's answer, so that `id`, `created` and `model` are the same on all chunks.

    `vitstripe.vit_calls` tells which calls of the vision encoder the request's images were part of: requests that share
    a number were encoded together.
    """

    kind: Kind
    id: str
    created: int
    model: str
    include_usage: bool
    running_usage: bool = False

    @classmethod
    def begin(cls, kind: Kind, model: str, include_usage: bool, running_usage: bool = False) -> "Answer":
        """A new answer; requests in the engine are named by its id, so it is never one that a client chose."""
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        return cls(kind, f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, include_usage, running_usage)

    def whole(self, choices: Sequence[Whole], totals: Totals) -> dict[str, Any]:
        calls = sorted({call for choice in choices for call in choice.outcome.vit_calls})
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._head(name) | {
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_body(totals),
            "vitstripe": {"vit_calls": calls},
        }

    def _choice(self, index: int, choice: Whole) -> dict[str, Any]:
        message = choice.message
        body = {"message": message_body(message)} if self.kind == "chat" else {"text": message.content}
        outcome = choice.outcome
        return {
            "index": index,
            **body,
            "logprobs": choice.logprobs,
            "finish_reason": outcome.reason,
            "stop_reason": outcome.matched,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a chat's choice names the role; a completion has none."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk(index, role) if self.kind == "chat" else None

    def piece(
        self, index: int, delta: Delta, logprobs: dict[str, Any] | None = None, totals: Totals | None = None
    ) -> dict[str, Any]:
        """totals: counts so far, for a client that wants them with each chunk."""
        if self.kind == "chat":
            return self._chunk(index, {"delta": delta_body(delta)}, logprobs, totals)
        assert isinstance(delta, Text), "a completion is plain text"
        return self._chunk(index, {"text": delta.text}, logprobs, totals)

    def closing(
        self, index: int, outcome: Outcome, logprobs: dict[str, Any] | None = None, totals: Totals | None = None
    ) -> dict[str, Any]:
        chunk = self._chunk(index, {"delta": {}} if self.kind == "chat" else {"text": ""}, logprobs, totals)
        chunk["choices"][0] |= {"finish_reason": outcome.reason, "stop_reason": outcome.matched}
        return chunk | {"vitstripe": {"vit_calls": list(outcome.vit_calls)}}

    def totals(self, totals: Totals) -> dict[str, Any]:
        """The chunk after the last one that `stream_options.include_usage` asks for."""
        return self._head(self._chunk_name()) | {"choices": [], "usage": usage_body(totals)}

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        totals: Totals | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        running = usage_body(totals) if totals is not None and self.running_usage else None
        usage = {"usage": running} if self.include_usage or running else {}
        return self._head(self._chunk_name()) | {"choices": [choice]} | usage

    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def message_body(message: Message) -> dict[str, Any]:
    """The assistant's message. Content that is blank beside calls or reasoning is null, as OpenAI has it."""
    beside = bool(message.calls or message.reasoning)
    body: dict[str, Any] = {
        "role": "assistant",
        "content": None if beside and not message.content.strip() else message.content,
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return body


def delta_body(delta: Delta) -> dict[str, Any]:
    """A chunk's delta: keys that say nothing are left out, a call's id and name come once."""
    match delta:
        case Text("content", text):
            return {"content": text}
        case Text(_, text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def usage_body(totals: Totals) -> dict[str, Any]:
    usage = totals.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "image_tokens": usage.image_tokens},
        "completion_tokens_details": {"reasoning_tokens": totals.reasoning_tokens},
    }
