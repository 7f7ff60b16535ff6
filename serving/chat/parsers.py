"""Which parser reads a model's calls and reasoning: by name, or by what the checkpoint's template shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.chat import formats
from serving.chat.parser import AnswerParser, CallReader, Opening, Reading
from serving.chat.template import ChatTemplate

Format = Callable[[CallReader], Reading[bool]]

_FORMATS: dict[str, Format] = {
    "hermes": formats.hermes,
    "qwen3_coder": formats.qwen3_coder,
    "glm": formats.glm,
}
_ALIASES = {"qwen25": "hermes", "qwen3_xml": "qwen3_coder", "glm45": "glm", "glm47": "glm"}
_REASONING = {"think": True, "qwen3": True, "glm45": True, "none": False}

# What only this format's templates hold, the most telling first.
_MARKS = {"qwen3_coder": "<function=", "glm": "<arg_key>", "hermes": "<tool_call>"}
# Beginnings of config.json's model_type, for templates that show nothing; the longest that fits counts.
_FAMILIES = {"qwen": "hermes", "qwen3_5": "qwen3_coder", "qwen4": "qwen3_coder", "glm": "glm"}

TOOL_PARSERS = ("auto", *_FORMATS, *_ALIASES, "none")
REASONING_PARSERS = ("auto", *_REASONING)


@dataclass(frozen=True)
class Parsers:
    """How answers of one model are read.

    tools: a name of TOOL_PARSERS except auto. reasoning: whether `<think>` blocks are split off. Raises ValueError
    naming the known ones.
    """

    tools: str = "none"
    reasoning: bool = False

    def __post_init__(self) -> None:
        if self.tools not in _FORMATS and self.tools != "none":
            raise ValueError(f"tool parser {self.tools!r} is not known; choose one of {', '.join(TOOL_PARSERS)}")

    def parser(
        self, opening: Opening, tools: Mapping[str, object] | None = None, *, parallel: bool = True
    ) -> AnswerParser:
        """A parser of one answer.

        Args:
            opening: what the end of the prompt left open (`opening_of`).
            tools: parameter schemas by name; None when the request has no tools, and then no call is looked for.
        """
        return AnswerParser(
            opening=opening if self.reasoning else "content",
            read_call=None if tools is None else _FORMATS.get(self.tools),
            tools=tools,
            parallel=parallel,
        )


def choose_parsers(
    template: ChatTemplate | None, config: Mapping[str, Any], *, tools: str = "auto", reasoning: str = "auto"
) -> Parsers:
    """The parsers with these names; "auto" goes by what the template shows, or else by config.json's model_type."""
    source = template.source if template is not None else ""
    if tools == "auto":
        shown = [name for name, mark in _MARKS.items() if mark in source]
        kind = str(config.get("model_type", ""))
        family = [_FAMILIES[start] for start in sorted(_FAMILIES, key=len) if kind.startswith(start)]
        tools = (shown[:1] or family[-1:] or ["none"])[0]
    if reasoning not in REASONING_PARSERS:
        raise ValueError(f"reasoning parser {reasoning!r} is not known; choose one of {', '.join(REASONING_PARSERS)}")
    return Parsers(_ALIASES.get(tools, tools), _REASONING.get(reasoning, "<think>" in source))


def opening_of(prompt: str) -> Opening:
    """What the end of a rendered prompt left open. The prompt is asked, not the request: templates differ in what they
    make of its switches."""
    tail = prompt.rstrip()
    if tail.endswith("<think>"):
        return "reasoning"
    return "content" if tail.endswith("</think>") else "undecided"
