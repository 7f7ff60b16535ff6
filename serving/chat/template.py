"""Chat messages to prompt text, by the checkpoint's own template.

Nothing of a template is written here: point releases of one model differ in single newlines.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.sandbox

from serving.tokenizer import read_json, token_text

_PRIVATE_USE = range(0x100000, 0x10FFFE)
_PROBE = "probe"


class TemplateFault(ValueError):  # noqa: N818 -- it is the chat that is at fault, not the server
    """The template refused a chat; the text is the template's own and is shown to the client."""


class Shield:
    """Hides callers' text from the matching of added tokens.

    A typed `<|image_pad|>` would shift the image placeholders and a typed `<|im_start|>` would forge a turn. Each
    character that an added token begins with is swapped for a private-use one before rendering, and back after the
    tokens were matched. No added token can come about in between, not even from two texts that meet, while templates
    can still trim and test the text.

    Args:
        initials: first characters of all added tokens.
        texts: every caller's text of one request; stand-ins are chosen among characters that none of them holds.

    Raises:
        TemplateFault: the texts hold all but a few of the private-use characters.
    """

    def __init__(self, initials: Iterable[str], texts: Iterable[str]):
        used = set().union(*texts)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        initials = sorted(initials)
        pairs = [(ord(initial), ord(stand_in)) for initial, stand_in in zip(initials, free, strict=False)]
        if len(pairs) < len(initials):
            raise TemplateFault("the texts hold every private-use character of Unicode's last plane; leave some out")
        self._hide = dict(pairs)
        self._restore = {stand_in: initial for initial, stand_in in pairs}

    def hide(self, text: str) -> str:
        return text.translate(self._hide)

    def restore(self, text: str) -> str:
        return text.translate(self._restore)


class ChatTemplate:
    """A Jinja chat template in an immutable sandbox.

    Args:
        source: the template's text. It comes from the checkpoint, never from a request.
        special_tokens: names such as `bos_token` that templates may use.

    Attributes:
        takes_parts: the template reads content given as a list of parts; others only read strings.
        takes_tools: the template shows the tools that it is given.
        variables: names that the template reads, such as `enable_thinking`.

    Raises:
        ValueError: the template does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self.takes_parts = self._reads_parts()
        self.takes_tools = self._shows_tools()

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> "ChatTemplate":
        """Read `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json`.

        Raises:
            FileNotFoundError: the checkpoint has neither.
            ValueError: the template does not parse.
        """
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise FileNotFoundError(
                f"{folder}: neither chat_template.jinja nor a chat_template in tokenizer_config.json; "
                "copy the checkpoint's chat template into the folder"
            )
        named = {name: token_text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(source, {name: text for name, text in named.items() if text is not None})

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **switches: bool | str
    ) -> str:
        """The prompt of a chat, up to and including the opening of the assistant's turn.

        Args:
            messages: objects with `role` and `content`, which is a string or a list of parts,
                {"type": "text", "text": ...} or {"type": "image"}; an assistant's may have `reasoning_content` and
                `tool_calls`, a tool's `tool_call_id`.
            tools: objects as OpenAI's `tools` has them.
            switches: further names that the template reads. None of them can replace those that it gets here.

        Raises:
            TemplateFault: the template raised.
        """
        try:
            named = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": True}
            return self._template.render(switches | self._special_tokens | named)
        except jinja2.TemplateError as error:
            raise TemplateFault(f"the chat template refused the messages: {error.message}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            # The texts of these may quote a caller's message; the type is enough to look it up.
            raise TemplateFault(f"the chat template failed on the messages ({type(error).__name__})") from error

    def _shows_tools(self) -> bool:
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            rendered = self.render(
                [{"role": "user", "content": "hi"}], tools=[{"type": "function", "function": function}]
            )
        except TemplateFault:
            return False
        return _PROBE in rendered

    def _reads_parts(self) -> bool:
        try:
            rendered = self.render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        except TemplateFault:
            return False
        return _PROBE in rendered and "'type'" not in rendered  # a template for strings prints the list itself


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without Jinja's escaping for HTML, as chat templates expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)
