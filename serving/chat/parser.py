r"""A model's text to the fields of an answer, piece by piece.

The parser is a coroutine that is sent one character at a time, so that how the text was cut into pieces cannot matter:
an answer that is not streamed is the same deltas put together. No text is lost. What looks like markup and turns out
not to be is text again, and only a few characters are ever read twice.

```
        <think>              </think>                <tool_call>        </tool_call>
UNDECIDED -----> REASONING ------------> CONTENT ------------------> a call ---.
     \___ other text _____________________^  ^________________________________/
                      \____ a confirmed call ___^
```
"""

import secrets
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Literal, TypeVar

from serving.chat.deltas import CallArguments, CallStart, Delta, Field, Text, joined
from serving.chat.values import Schema

T = TypeVar("T")
Reading = Generator[None, str, T]
"""A coroutine that is sent characters, and the empty string at the end of the text."""

Opening = Literal["content", "reasoning", "undecided"]
END = ""
_THINK, _THINK_END, _CALL = "<think>", "</think>", "<tool_call>"


class AnswerParser:
    """Splits one answer into content, reasoning and tool calls.

    Args:
        opening: what the prompt's end left open: a block of reasoning, none, or "undecided" when the model itself may
            open one. "content" for a model without reasoning.
        read_call: reads a call in the model's format (serving.chat.formats); None leaves calls in the content.
        tools: parameter schema by tool name; calls of other names are passed on too.
        parallel: False ends the answer after its first call.
        new_id: makes a call's id.

    Attributes:
        calls: completed calls.
        stopped: the answer is over, whatever else the model says.
    """

    def __init__(
        self,
        *,
        opening: Opening = "content",
        read_call: "Callable[[CallReader], Reading[bool]] | None" = None,
        tools: Mapping[str, object] | None = None,
        parallel: bool = True,
        new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ):
        self._read_call = read_call
        self._tools = tools or {}
        self._parallel = parallel
        self._new_id = new_id
        self._out: list[Delta] = []
        self._blanks: list[str] = []
        self._started = 0
        self._in_reasoning = opening == "reasoning"
        self._is_plain = opening == "content" and read_call is None  # nothing to look for
        self.calls = 0
        self.stopped = False
        self.source = Source()
        self._machine = self._answer(opening)
        next(self._machine)

    @property
    def reasoning(self) -> bool:
        """The text that comes next is reasoning, as far as is known."""
        return self._in_reasoning

    def push(self, text: str) -> list[Delta]:
        """What `text` adds. After the end of the answer nothing does."""
        if self._is_plain:
            return [Text("content", text)] if text else []
        for character in text:
            if self.stopped:
                break
            self._machine.send(character)
        return self._take()

    def finish(self, *, natural: bool = True) -> list[Delta]:
        """What was held back, now that the text is over.

        Args:
            natural: the model ended it; otherwise it was cut, and a call that is cut stays so.
        """
        if not self.source.ended:
            self.source.ended, self.source.natural = True, natural
            if not self.stopped:
                with suppress(StopIteration):
                    self._machine.send(END)
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return joined(out)

    # What the coroutine is made of

    def _answer(self, opening: Opening) -> Reading[None]:
        if opening == "undecided":
            blanks = yield from self.source.blanks()
            if (yield from self.source.literal(_THINK)):
                self._in_reasoning = True
            else:
                self._blanks.append(blanks)
        if self._in_reasoning:
            yield from self._reasoning()
        while (yield from self._text("content", _CALL)):
            yield from self._call("content")
        if not self._started:
            self._say("content", "")

    def _reasoning(self) -> Reading[None]:
        """Reasoning up to its close tag, or to a call: some models call without closing. Edge blanks are dropped."""
        yield from self.source.blanks()
        if (yield from self.source.literal(_THINK)):  # an echo of what the prompt opened
            yield from self.source.blanks()
        while marker := (yield from self._text("reasoning", _CALL, _THINK_END)):
            if marker == _THINK_END or (yield from self._call("reasoning")):
                break
        self._in_reasoning = False
        self._blanks.clear()
        if marker == _THINK_END:
            yield from self.source.blanks("\n")

    def _text(self, field: Field, *markers: str) -> Reading[str | None]:
        """Text up to one of the markers, which is returned, or to the end. Blanks in front of it are still held."""
        source = self.source
        watched = [marker for marker in markers if marker != _CALL or self._read_call is not None]
        while (character := (yield from source.next())) != END:
            if character.isspace() and watched:
                self._blanks.append(character)
                continue
            if character == "<":
                source.unread("<")
                if marker := (yield from source.literal(*watched)):
                    return marker
                yield from source.next()
            self._say(field, character)
        return None

    def _say(self, field: Field, text: str) -> None:
        text = "".join(self._blanks) + text
        self._blanks.clear()
        if text:
            self._out.append(Text(field, text))

    def _call(self, field: Field) -> Reading[bool]:
        """One call; False when it was none, and then it has become text."""
        assert self._read_call is not None
        reader = CallReader(self.source, self._begin_call, self._add_arguments)
        self.source.mark()
        if not (yield from self._read_call(reader)):
            self._say(field, _CALL + self.source.marked())
            return False
        self.source.marked()
        self.calls += reader.complete
        self.stopped = reader.complete and not self._parallel
        return True

    def _begin_call(self, name: str) -> Schema:
        self._blanks.clear()
        self._in_reasoning = False
        self._out.append(CallStart(self._started, self._new_id(), name))
        self._started += 1
        return Schema(self._tools.get(name))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._started - 1, text))


class Source:
    """The characters of one answer, with a little to look ahead."""

    def __init__(self) -> None:
        self._unread: deque[str] = deque()
        self._mark: list[str] | None = None
        self.ended = False
        self.natural = True

    def next(self) -> Reading[str]:
        if self._unread:
            character = self._unread.popleft()
        elif self.ended:
            return END
        else:
            character = yield
        if self._mark is not None and character:
            self._mark.append(character)
        return character

    def unread(self, text: str) -> None:
        """Puts back what was read last."""
        self._unread.extendleft(reversed(text))
        if self._mark is not None and text:
            del self._mark[-len(text) :]

    def mark(self) -> None:
        """From here on what is read is remembered."""
        self._mark = []

    def marked(self) -> str:
        """What was read since the mark, which is taken away."""
        text, self._mark = "".join(self._mark or ()), None
        return text

    def blanks(self, kinds: str | None = None) -> Reading[str]:
        """The blanks that come next; `kinds` are the characters that count, None for all white space."""
        found: list[str] = []
        while (character := (yield from self.next())) and (
            character.isspace() if kinds is None else character in kinds
        ):
            found.append(character)
        self.unread(character)
        return "".join(found)

    def literal(self, *options: str) -> Reading[str | None]:
        """The one of `options` that comes next; None, and nothing is read, when it is none of them."""
        read = ""
        while any(option.startswith(read) for option in options):
            if read in options:
                return read
            character = yield from self.next()
            if character == END:
                break
            read += character
        self.unread(read)
        return None

    def until(self, stops: str, limit: int) -> Reading[str]:
        """What comes before one of the characters in `stops`, of which none is read; at most `limit` characters."""
        found: list[str] = []
        while len(found) < limit and (character := (yield from self.next())) != END:
            if character in stops:
                self.unread(character)
                break
            found.append(character)
        return "".join(found)

    def value(self, say: Callable[[str], None], *markers: str) -> Reading[str | None]:
        """Hands what comes to `say` up to one of the markers, which is returned; None at the end of the text."""
        while (character := (yield from self.next())) != END:
            if character == "<":
                self.unread("<")
                if marker := (yield from self.literal(*markers)):
                    return marker
                yield from self.next()
            say(character)
        return None


class CallReader:
    """What a call format reads from and writes to.

    Attributes:
        complete: the call was read to its end.
    """

    def __init__(self, source: Source, begin: Callable[[str], Schema], add: Callable[[str], None]):
        self.source = source
        self.complete = False
        self._begin = begin
        self.say = add

    def confirm(self, name: str) -> Schema:
        """It is a call. From now on what is read belongs to it."""
        self.source.marked()
        return self._begin(name)
