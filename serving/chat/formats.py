"""How model families write a tool call, after `<tool_call>`.

Each function reads one call and returns whether it was one. Nothing is said before that is certain; from then on what
does not belong to the call is left unread, and becomes the answer's text again.
"""

from collections.abc import Callable

from serving.chat.parser import END, CallReader, Reading
from serving.chat.values import decoded, dumps

_CLOSE = "</tool_call>"
_NAME_CHARS = 128
_KEY_CHARS = 512
_NO_NAME = '<>"{}()[],;\\ \t\r\n'


def hermes(call: CallReader) -> Reading[bool]:
    """`{"name": NAME, "arguments": {...}}`: Hermes, Qwen2.5, Qwen3, Qwen3-VL.

    The arguments are passed on character by character as they were written, so that numbers keep their digits.
    """
    source = call.source
    yield from source.blanks()
    if not (yield from source.literal("{")):
        return False
    name = held = None
    done = closed = False
    while True:
        yield from source.blanks()
        key = yield from _key(call)
        if key == "name" and name is None:
            name = yield from _string(call)
            if not name:
                return False
            call.confirm(name)
            for piece in held or ():
                call.say(piece)
        elif key == "arguments" and not done and held is None:
            if name is None:
                held = []
                done = yield from _json_value(call, held.append)
            else:
                source.marked()
                done = yield from _json_value(call, call.say)
        else:
            break
        if name is not None:
            source.mark()  # should no key follow, all of this is text
        yield from source.blanks()
        if not (yield from source.literal(",")):
            closed = bool((yield from source.literal("}")))
            break
    if name is None:
        return False
    rest = source.marked()
    if not closed:
        source.unread(rest)
    elif not done:
        call.say("{}")
    call.complete = closed or done
    yield from _end(call)
    return True


def qwen3_coder(call: CallReader) -> Reading[bool]:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`: Qwen3-Coder, Qwen3.5 and later.

    One line break at each end of a value belongs to the format.
    """
    source = call.source
    yield from source.blanks()
    if not (yield from source.literal("<function=")):
        return False
    name = yield from source.until("<>\n", _NAME_CHARS)
    if not name.strip() or not (yield from source.literal(">")):
        return False
    schema = call.confirm(name.strip())
    arguments = _Arguments(call)
    yield from source.blanks()
    marker = yield from source.literal("<parameter=", "</function>", _CLOSE)
    while marker == "<parameter=":
        source.mark()
        key = yield from source.until("<>\n", _KEY_CHARS)
        if not key or not (yield from source.literal(">")):
            source.unread(source.marked())
            source.unread(marker)
            marker = None
            break
        source.marked()
        written: list[str] = []
        marker = yield from source.value(written.append, "</parameter>", "<parameter=", "</function>")
        value = "".join(written).removeprefix("\n")
        if marker is None and not source.natural:
            arguments.cut(key, value, is_text=schema.types(key) <= {"string"})
            return True
        arguments.add(key, schema.encode(key, value.removesuffix("\n"), guess=False))
        if marker == "</parameter>":
            yield from source.blanks()
            marker = yield from source.literal("<parameter=", "</function>", _CLOSE)
    if marker == "</function>":
        yield from source.blanks()
        yield from source.literal(_CLOSE)
    yield from arguments.close(closed=marker is not None)
    return True


def glm(call: CallReader) -> Reading[bool]:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`: GLM-4.5 and later, with or without line breaks.

    Values are verbatim. Those that can only be strings are passed on as they come.
    """
    source = call.source
    yield from _breaks(call)
    name = yield from source.until(_NO_NAME, _NAME_CHARS)
    yield from _breaks(call)
    if not name:
        return False
    marker = yield from source.literal("<arg_key>", _CLOSE)
    if marker is None:
        return False
    schema = call.confirm(name)
    arguments = _Arguments(call)
    while marker == "<arg_key>":
        source.mark()
        key = yield from source.until("<", _KEY_CHARS)
        found = yield from source.literal("</arg_key>")
        if found:
            yield from _breaks(call)
            found = yield from source.literal("<arg_value>")
        if not found:
            source.unread(source.marked())
            source.unread(marker)
            marker = None
            break
        source.marked()
        key = key.strip()
        if schema.types(key) == {"string"}:
            arguments.begin(key)
            call.say('"')
            ended = yield from source.value(lambda text: call.say(dumps(text)[1:-1]), "</arg_value>")
            if ended is None and not source.natural:
                return True
            call.say('"')
        else:
            written: list[str] = []
            ended = yield from source.value(written.append, "</arg_value>")
            if ended is None and not source.natural:
                arguments.cut(key, "".join(written), is_text=False)
                return True
            arguments.add(key, schema.encode(key, "".join(written), guess=True))
        yield from _breaks(call)
        marker = yield from source.literal("<arg_key>", _CLOSE)
    yield from arguments.close(closed=marker is not None)
    return True


class _Arguments:
    """Writes the JSON object of a call argument by argument."""

    def __init__(self, call: CallReader):
        self._call = call
        self._separator = "{"

    def begin(self, key: str) -> None:
        self._call.say(f"{self._separator}{dumps(key)}: ")
        self._separator = ", "

    def add(self, key: str, encoded: str) -> None:
        self.begin(key)
        self._call.say(encoded)

    def cut(self, key: str, text: str, *, is_text: bool) -> None:
        """The last argument of an answer that was cut: what there is of it, left open."""
        self.begin(key)
        self._call.say(dumps(text)[:-1] if is_text else text)

    def close(self, *, closed: bool) -> Reading[None]:
        """The end of the object, unless the answer was cut here and more arguments may have been to come."""
        source = self._call.source
        if not closed:
            character = yield from source.next()
            source.unread(character)
            closed = character != END or source.natural
        if closed:
            self._call.say("{}" if self._separator == "{" else "}")
            self._call.complete = True


def _breaks(call: CallReader) -> Reading[None]:
    """Blanks, and a line break that was written as a backslash and an n."""
    while True:
        yield from call.source.blanks()
        if not (yield from call.source.literal("\\n")):
            return


def _end(call: CallReader) -> Reading[None]:
    yield from call.source.blanks()
    yield from call.source.literal(_CLOSE)


# JSON


def _key(call: CallReader) -> Reading[str | None]:
    """A key and its colon, with the blanks around."""
    key = yield from _string(call)
    yield from call.source.blanks()
    if key is None or not (yield from call.source.literal(":")):
        return None
    yield from call.source.blanks()
    return key


def _string(call: CallReader) -> Reading[str | None]:
    """A JSON string, decoded; None when there is none."""
    written: list[str] = []
    if not (yield from call.source.literal('"')) or not (yield from _to_quote(call, written.append)):
        return None
    return decoded("".join(written))


def _to_quote(call: CallReader, say: Callable[[str], None]) -> Reading[bool]:
    """The inside of a JSON string up to and without its closing quote; whether that came."""
    escaped = False
    while (character := (yield from call.source.next())) != END:
        if character == '"' and not escaped:
            return True
        escaped = character == "\\" and not escaped
        say(character)
    return False


def _json_value(call: CallReader, say: Callable[[str], None]) -> Reading[bool]:
    """A value as it is written; a string is decoded once, null is the empty object. Whether it came to its end."""
    source = call.source
    first = yield from source.next()
    if first == '"':
        written: list[str] = []
        ended = yield from _to_quote(call, written.append)
        text = "".join(written)
        inner = decoded(text) if ended else None
        say(text if inner is None else inner)
        return ended
    if first not in ("{", "["):
        source.unread(first)
        scalar = (yield from source.until(',}<" \t\r\n', _KEY_CHARS)).strip()
        say("{}" if scalar == "null" else scalar)
        return bool(scalar)
    say(first)
    depth = 1
    while depth:
        character = yield from source.next()
        if character in (END, "<"):  # JSON has no "<" outside of strings: the call was broken off
            source.unread(character)
            return False
        say(character)
        depth += (character in "{[") - (character in "}]")
        if character == '"':
            if not (yield from _to_quote(call, say)):
                return False
            say('"')
    return True
