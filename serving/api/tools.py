"""Tools of a chat: what may be called, as the client declared it, and what the template is told."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from serving.api.errors import invalid, unsupported
from serving.api.fields import Fields, kind

NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 128
_MAX_DEPTH = 32

# Switches of chat templates that a client may set; any other could change what is rendered or how (`tokenize`,
# `chat_template`, `messages`), and is refused.
_SWITCHES = ("enable_thinking", "preserve_thinking", "clear_thinking", "add_vision_id")
_ALIASES = {"thinking": "enable_thinking"}
SWITCH_NAMES = (*_SWITCHES, *_ALIASES)
SWITCHES = frozenset({*_SWITCHES, "reasoning_effort"})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Tools:
    """`declared` are the client's own objects: the template gets them without fields added, in the client's order."""

    declared: tuple[dict[str, Any], ...] = ()
    parallel: bool = True

    def parameters(self) -> dict[str, object]:
        """Parameter schemas by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.declared}


def read_tools(fields: Fields) -> Tools:
    """The tools that the model may call; none when `tool_choice` is "none".

    Raises:
        ApiError: 400: a tool that is not a function with a plain name, or a choice that would have to be enforced.
    """
    entries = fields.get("tools")
    if entries is not None and not isinstance(entries, list):
        raise invalid(f"tools must be a list, not {kind(entries)}", "tools")
    if entries and len(entries) > MAX_TOOLS:
        raise invalid(f"{len(entries)} tools: the limit is {MAX_TOOLS}; send fewer", "tools")
    declared = tuple(_tool(entry, f"tools[{k}]") for k, entry in enumerate(entries or ()))
    names = [tool["function"]["name"] for tool in declared]
    twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if twice is not None:
        raise invalid(f"two tools are named {twice!r}; give each its own name", "tools")
    parallel = fields.get("parallel_tool_calls") is None or fields.boolean("parallel_tool_calls")
    match fields.get("tool_choice"):
        case None | "auto":
            return Tools(declared, parallel)
        case "none":
            return Tools((), parallel)
        case "required" | {"type": "function"}:
            raise unsupported(
                "tool_choice", 'this server cannot force a call; send tool_choice "auto" or "none", or leave it out'
            )
    raise invalid('tool_choice must be "auto" or "none"', "tool_choice")


def _tool(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise invalid(f"{where} must be an object, not {kind(entry)}", where)
    fields = Fields(entry, where)
    if fields.text("type") != "function":
        raise unsupported(f"{where}.type", f'{where}.type must be "function"')
    function = fields.object("function")
    if function is None:
        raise invalid(f"{where}.function is missing", f"{where}.function")
    read_name(function)
    function.text("description")
    function.object("parameters")
    check_depth(entry, where)
    return entry


def read_name(function: Fields) -> str:
    function.required("name")
    name = function.text("name") or ""
    if not _NAME.fullmatch(name):
        where = function.name("name")
        raise invalid(f"{where} must be 1 to 64 letters, digits, underscores, dots or dashes", where)
    return name


def read_switches(fields: Fields) -> dict[str, Any]:
    """Switches of the template, from `chat_template_kwargs` and `reasoning_effort`.

    Raises:
        ApiError: 400: one that is not on the list, or not a boolean.
    """
    switches: dict[str, Any] = {}
    sent = fields.object("chat_template_kwargs")
    for name in sent.names() if sent is not None else ():
        assert sent is not None
        known = _ALIASES.get(name, name)
        if known not in _SWITCHES:
            raise unsupported(
                "chat_template_kwargs",
                f"chat_template_kwargs.{name[:64]} is not accepted; only {', '.join(SWITCH_NAMES)} are",
            )
        if sent.get(name) is not None:
            switches[known] = sent.boolean(name)
    effort = fields.text("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    if effort == "none":
        switches["enable_thinking"] = False
    elif effort is not None:
        switches["reasoning_effort"] = effort
    return switches


def check_depth(value: object, where: str) -> None:
    """Templates walk through what they are given; this bounds how deep."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise invalid(f"{where} is nested more than {_MAX_DEPTH} deep; flatten it", where)
        level = [inner for outer in level for inner in _inner(outer)]


def strings(value: object) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    for inner in _inner(value):
        yield from strings(inner)


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
