"""What an answer grows by: text of one of its fields, or a part of a tool call."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Field = Literal["content", "reasoning"]


@dataclass(frozen=True)
class Text:
    field: Field
    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins. `index` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments; all pieces together are JSON text."""

    index: int
    text: str


Delta = Text | CallStart | CallArguments


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A whole answer, put together from its deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> "Message":
        for delta in deltas:
            match delta:
                case Text("content", text):
                    self.content += text
                case Text(_, text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
        return self


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one field or one call put together."""
    groups: list[tuple[Delta, list[str]]] = []
    for delta in deltas:
        text = "" if isinstance(delta, CallStart) else delta.text
        if groups and _continues(groups[-1][0], delta):
            groups[-1][1].append(text)
        else:
            groups.append((delta, [text]))
    return [_with_text(first, "".join(texts)) for first, texts in groups]


def _continues(last: Delta, delta: Delta) -> bool:
    match last, delta:
        case Text(a, _), Text(b, _):
            return a == b
        case CallArguments(a, _), CallArguments(b, _):
            return a == b
    return False


def _with_text(first: Delta, text: str) -> Delta:
    match first:
        case Text(name, _):
            return Text(name, text)
        case CallArguments(index, _):
            return CallArguments(index, text)
    return first
