"""The messages of a chat: turns of text and images, calls of tools and what they gave."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from serving.api.errors import invalid
from serving.api.fields import Fields, kind, parse_object
from serving.api.limits import Limits
from serving.api.media import ImageSource, image_source
from serving.api.tools import check_depth, read_name, strings

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_REFUSED: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": ()}


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    """`source` is where the image comes from; `param` names the part in errors."""

    source: ImageSource
    param: str


Part = TextPart | ImagePart


@dataclass(frozen=True)
class PastCall:
    """A call that the assistant made; `arguments` is the object itself, as templates want it."""

    id: str | None
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One turn. `plain` is set when the content came as a string: some templates treat the two forms differently.

    `reasoning` and `calls` belong to an assistant's turn, `call_id` and `name` to a tool's.
    """

    role: Role
    parts: tuple[Part, ...]
    plain: bool
    reasoning: str | None = None
    calls: tuple[PastCall, ...] = ()
    call_id: str | None = None
    name: str | None = None

    def texts(self) -> Iterator[str]:
        """Every text of the turn that a client chose."""
        for part in self.parts:
            if isinstance(part, TextPart):
                yield part.text
        for call in self.calls:
            yield from (call.id or "", call.name)
            yield from strings(call.arguments)
        yield from (self.reasoning or "", self.call_id or "", self.name or "")


def read_messages(entries: Any, limits: Limits) -> tuple[Message, ...]:
    """The turns of a chat.

    Raises:
        ApiError: 400, naming the message and its field.
    """
    if not isinstance(entries, list):
        raise invalid(f"messages must be a list, not {kind(entries)}", "messages")
    if not entries:
        raise invalid("messages is empty; send at least one", "messages")
    if len(entries) > limits.max_messages:
        raise invalid(f"{len(entries)} messages: the limit is {limits.max_messages}; send fewer", "messages")
    messages = tuple(_message(entry, f"messages[{k}]", limits) for k, entry in enumerate(entries))
    called = False
    for k, message in enumerate(messages):
        if message.role == "tool" and not called:
            raise invalid(f"messages[{k}]: a tool's answer needs an assistant message with tool_calls before it",
                          f"messages[{k}].role")  # fmt: skip
        called = bool(message.calls) or (called and message.role == "tool")
    return messages


def _message(entry: Any, where: str, limits: Limits) -> Message:
    if not isinstance(entry, dict):
        raise invalid(f"{where} must be an object, not {kind(entry)}", where)
    fields = Fields(entry, where)
    role = _ROLES.get(fields.text("role") or "")
    if role is None:
        raise invalid(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
    fields.refuse(_REFUSED)
    parts, plain = _content(fields, role, limits)
    if role == "assistant":
        reasoning = fields.text("reasoning_content")
        reasoning = fields.text("reasoning") if reasoning is None else reasoning
        return Message(role, parts, plain, reasoning=reasoning, calls=tuple(_calls(fields)))
    if fields.get("tool_calls") not in (None, []):
        raise invalid(f"{where}.tool_calls belongs to assistant messages", f"{where}.tool_calls")
    if role == "tool":
        return Message(role, parts, plain, call_id=fields.text("tool_call_id"), name=fields.text("name"))
    return Message(role, parts, plain)


def _content(fields: Fields, role: Role, limits: Limits) -> tuple[tuple[Part, ...], bool]:
    content, where = fields.get("content"), fields.name("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, str):
        return (TextPart(content),), True
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of parts, not {kind(content)}", where)
    if not content:
        raise invalid(f"{where} is empty; send at least one part", where)
    parts = tuple(_parts(content, where, limits))
    if role != "user" and any(isinstance(part, ImagePart) for part in parts):
        raise invalid(f"{fields.name('role')} is {role}: images may only be in user messages", where)
    # A tool's answer is one text; templates write it as it is.
    return parts, role == "tool"


def _calls(fields: Fields) -> Iterator[PastCall]:
    entries, where = fields.get("tool_calls"), fields.name("tool_calls")
    if entries is not None and not isinstance(entries, list):
        raise invalid(f"{where} must be a list, not {kind(entries)}", where)
    for k, entry in enumerate(entries or ()):
        param = f"{where}[{k}]"
        if not isinstance(entry, dict):
            raise invalid(f"{param} must be an object, not {kind(entry)}", param)
        call = Fields(entry, param)
        function = call.object("function")
        if function is None or call.text("type") not in (None, "function"):
            raise invalid(f"{param} must be a function call: type and function are missing or of another kind", param)
        yield PastCall(call.text("id"), read_name(function), _arguments(function))


def _arguments(function: Fields) -> dict[str, Any]:
    """Arguments come as JSON text in a string; templates want the object."""
    value, where = function.get("arguments"), function.name("arguments")
    if isinstance(value, str):
        value = parse_object(value, where) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise invalid(f"{where} must be the JSON text of an object, not of {kind(value)}", where)
    check_depth(value, where)
    return value


def _parts(content: list[Any], where: str, limits: Limits) -> Iterator[Part]:
    for k, entry in enumerate(content):
        param = f"{where}[{k}]"
        if not isinstance(entry, dict):
            raise invalid(f"{param} must be an object, not {kind(entry)}", param)
        fields = Fields(entry, param)
        match fields.text("type"):
            case "text" | "input_text":
                fields.required("text")
                yield TextPart(fields.text("text") or "")
            case "image_url" | "input_image":
                yield ImagePart(image_source(_image_uri(fields), param, limits), param)
            case "video" | "video_url" | "input_video" as video:
                text = f"{param}.type is {video}: this server takes no videos; send single frames as image_url parts"
                raise invalid(text, f"{param}.type")
            case _:
                raise invalid(f"{param}.type must be text, image_url or input_image", f"{param}.type")


def _image_uri(fields: Fields) -> str:
    """`image_url` is a string in one dialect and an object with `url` in the other. `detail` has no meaning here."""
    value = fields.required("image_url")
    if isinstance(value, str):
        return value
    inner = fields.object("image_url")
    assert inner is not None
    inner.required("url")
    return inner.text("url") or ""
