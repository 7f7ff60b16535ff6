"""A model's text comes back as content, reasoning and calls, however it is cut."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.chat import AnswerParser, CallArguments, CallStart, Message, Text, formats
from serving.chat.deltas import Call, joined
from serving.chat.parser import Opening

FORMATS = {"hermes": formats.hermes, "qwen3_coder": formats.qwen3_coder, "glm": formats.glm, "none": None}
TOOLS = {
    "look": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "more": {"type": "object"},
            "either": {"type": ["string", "integer"]},
        },
    }
}


def parser(form: str, opening: Opening = "content", **other) -> AnswerParser:
    return AnswerParser(opening=opening, read_call=FORMATS[form], tools=TOOLS, new_id=lambda: "call_x", **other)


def read(pieces: Sequence[str], form: str, *, natural: bool = True, opening: Opening = "content", **other) -> Message:
    reader = parser(form, opening, **other)
    message = Message()
    for piece in pieces:
        message.add(reader.push(piece))
    return message.add(reader.finish(natural=natural))


def calls(*named: tuple[str, str]) -> list[Call]:
    return [Call("call_x", name, arguments) for name, arguments in named]


# Formats


@pytest.mark.parametrize(
    ("form", "text", "content", "called"),
    [
        (
            "hermes",
            'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"place": "Zürich \\"HB\\"}", "x": 1.50}}\n'
            "</tool_call>",
            "Let me see.",
            [("look", '{"place": "Zürich \\"HB\\"}", "x": 1.50}')],
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
            '<tool_call>{"name":"b","arguments":{"a":[{}]}}</tool_call>\n',
            "",
            [("look", "{}"), ("b", '{"a":[{}]}')],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1e400}, "name": "f"}</tool_call>!', "!", [("f", '{"a": 1e400}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=look>\n<parameter=place>\n007\n\n</parameter>\n<parameter=days>\n-5\n</parameter>\n"
            "</function>\n</tool_call>",
            "",
            [("look", '{"place": "007\\n", "days": -5}')],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=look><parameter=place>a <b> c<parameter=more>{'a': 1}</function></tool_call>",
            "",
            [("look", '{"place": "a <b> c", "more": "{\'a\': 1}"}')],
        ),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
        (
            "glm",
            "On it.<tool_call>look\n<arg_key>place</arg_key>\n<arg_value> a</arg_valu \n</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
            "On it.",
            [("look", '{"place": " a</arg_valu \\n", "days": 7}'), ("now", "{}")],
        ),
        ("glm", "<tool_call>now\\n</tool_call>", "", [("now", "{}")]),
        (
            "glm",
            "<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2.0]</arg_value>"
            "<arg_key>b</arg_key><arg_value>[1</arg_value></tool_call>",
            "",
            [("f", '{"a": [1, 2.0], "b": "[1"}')],
        ),
    ],
)  # fmt: skip
def test_calls_of_each_format(form: str, text: str, content: str, called: list[tuple[str, str]]):
    message = read([text], form)
    assert (message.content, message.calls) == (content, calls(*called))
    reader = parser(form)
    reader.push(text)
    reader.finish()
    assert reader.calls == len(called)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "write <tool_call> around it"),
        ("hermes", '<tool_call>{"nome": "f"}</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1'),
        ("qwen3_coder", "<tool_call>\n<function>x</function>"),
        ("qwen3_coder", "<tool_call><function=\n>"),
        ("glm", "the <tool_call> tag of GLM\nis"),
        ("glm", "<tool_call></tool_call>"),
        ("glm", "<tool_call>{}</tool_call>"),
        ("none", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("none", " a < b </think> \n"),
    ],
)
def test_what_only_looks_like_a_call_stays_text(form: str, text: str):
    message = read([text], form)
    assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "content", "called"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>\nSorry.', "\nSorry.", [("f", '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "f", "oops": 1}</tool_call>', ', "oops": 1}</tool_call>', [("f", "")]),
        ("hermes", '<tool_call><tool_call>{"name":"f","arguments":{}}', "<tool_call>", [("f", "{}")]),
        ("glm", "<tool_call>f<arg_key>a</arg_key>so", "<arg_key>a</arg_key>so", [("f", "{}")]),
        ("glm", "<tool_call>f\n<tool_call>g</tool_call>", "<tool_call>f\n", [("g", "{}")]),
        ("qwen3_coder", "<tool_call><function=f>then", "then", [("f", "{}")]),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=<x>1</parameter></function></tool_call>",
            "<parameter=<x>1</parameter></function></tool_call>",
            [("f", "{}")],
        ),
    ],
)
def test_a_broken_call_loses_no_text(form: str, text: str, content: str, called: list[tuple[str, str]]):
    message = read([text], form)
    assert (message.content, message.calls) == (content, calls(*called))


@pytest.mark.parametrize(
    ("form", "text", "natural", "cut"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": {"place": "Ber', '{"place": "Ber', '{"place": "Ber'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"days": 1}', '{"days": 1}', '{"days": 1}'),
        (
            "qwen3_coder",
            "<tool_call><function=look><parameter=place>\nBer",
            '{"place": "Ber"}',
            '{"place": "Ber',
        ),
        ("qwen3_coder", "<tool_call><function=look><parameter=days>1</parameter>", '{"days": 1}', '{"days": 1'),
        ("glm", "<tool_call>look<arg_key>place</arg_key><arg_value>Ber", '{"place": "Ber"}', '{"place": "Ber'),
        ("glm", "<tool_call>look<arg_key>days</arg_key><arg_value>12", '{"days": 12}', '{"days": 12'),
    ],
)
def test_a_call_that_the_length_cut_stays_cut_and_one_that_the_model_ended_is_closed(form, text, natural, cut):
    assert read([text], form, natural=True).calls == calls(("look", natural))
    assert read([text], form, natural=False).calls == calls(("look", cut))


def test_a_call_is_told_name_first_and_arguments_as_they_come():
    reader = parser("glm")
    deltas = [
        reader.push(piece) for piece in ("<tool_call>lo", "ok<arg_key>place</arg_key><arg_va", "lue>Ber", "lin</arg")
    ]
    assert deltas == [
        [],
        [CallStart(0, "call_x", "look")],
        [CallArguments(0, '{"place": "Ber')],
        [CallArguments(0, "lin")],
    ]
    assert reader.push("_value></tool_call>") == [CallArguments(0, '"}')]


def test_without_parallel_calls_the_answer_ends_after_the_first():
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call>'
    reader = parser("hermes", parallel=False)
    message = Message().add(reader.push(text) + reader.finish())
    assert (message.calls, reader.stopped) == (calls(("f", "{}")), True)


def test_ids_of_calls_are_words_of_their_own():
    reader = AnswerParser(read_call=formats.glm)
    starts = [d for d in reader.push("<tool_call>f</tool_call><tool_call>f</tool_call>") if isinstance(d, CallStart)]
    assert len({start.id for start in starts}) == 2
    assert all(len(start.id) == 29 and start.id.startswith("call_") for start in starts)


# Reasoning


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "content"),
    [
        ("reasoning", "\nhm, 3 < 4\n</think>\n\nFour.", "hm, 3 < 4", "Four."),
        ("reasoning", "<think>\nagain\n</think>Four.", "again", "Four."),
        ("reasoning", "it never ends \n", "it never ends", ""),
        ("undecided", "\n<think>hm</think>\n\n Four.\n", "hm", " Four.\n"),
        ("undecided", "  <thin ice", "", "  <thin ice"),
        ("undecided", "Four </think> five", "", "Four </think> five"),
        ("content", "<think>no</think>", "", "<think>no</think>"),
        ("reasoning", "a <tool_call> b </think>c", "a <tool_call> b", "c"),
    ],
)
def test_reasoning_is_told_by_what_the_prompt_left_open(opening: Opening, text: str, reasoning: str, content: str):
    message = read([text], "hermes", opening=opening)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_a_call_ends_the_reasoning_that_was_left_open():
    message = read(["I call now.\n<tool_call>now</tool_call> "], "glm", opening="reasoning")
    assert (message.reasoning, message.content, message.calls) == ("I call now.", "", calls(("now", "{}")))


def test_reasoning_holds_back_only_what_may_be_a_tag_or_an_edge():
    reader = parser("hermes", "reasoning")
    assert [reader.push(piece) for piece in ("\n so", " <b", " </thi", "nk>\n", "\nok ")] == [
        [Text("reasoning", "so")],
        [Text("reasoning", " <b")],
        [],
        [],
        [Text("content", "ok")],
    ]
    assert reader.finish() == [Text("content", " ")]


# Whatever a model says

_BITS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "</function>", "<parameter=", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ">", "<", "</", '{"name": "', '", "arguments": ', '{"',
    '"', "{", "}", "[", "\\", "\\n", "\n", " ", "look", "place", "days", "12", "null", ",", ":", "🙂", "é", "\x00",
    '{"name": "look", "arguments": {"place": "x"}}', "<function=look>", "<parameter=days>", "\u2028", "text",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(_BITS), st.text(max_size=3)), max_size=24).map("".join)


def cut(text: str, places: Sequence[int]) -> Iterator[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return (text[a:b] for a, b in pairwise(edges))


@settings(max_examples=120, deadline=None)
@given(
    TEXTS,
    st.lists(st.integers(0, 10_000), max_size=12),
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(["content", "reasoning", "undecided"]),
    st.booleans(),
    st.booleans(),
)
def test_every_way_of_cutting_a_text_gives_the_same_answer(text, places, form, opening, natural, parallel):
    whole = read([text], form, opening=opening, natural=natural, parallel=parallel)
    for pieces in (list(cut(text, places)), list(text)):
        assert read(pieces, form, opening=opening, natural=natural, parallel=parallel) == whole


@settings(max_examples=120, deadline=None)
@given(TEXTS, st.sampled_from(sorted(FORMATS)), st.sampled_from(["content", "reasoning", "undecided"]))
def test_no_word_of_a_text_is_lost(text: str, form: str, opening: Opening):
    """Marked with letters that no markup has: whatever the model says, each arrives in one field."""
    marked = "".join(f"{bit}µ{k}ß" if k % 3 == 0 else bit for k, bit in enumerate(text))
    message = read([marked], form, opening=opening)
    said = [message.content, message.reasoning, *(f"{call.name}{call.arguments}" for call in message.calls)]
    kept = "".join(said)
    for k in range(0, len(text), 3):
        assert f"µ{k}ß" in kept, (marked, message)


KEYS = st.text(st.characters(exclude_characters="<>\n", exclude_categories=["Cs"]), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, st.text(max_size=8), max_size=4))
def test_string_arguments_come_back_as_they_were(arguments: dict[str, str]):
    # What is around a key, and the opening of a tag in a value, belong to the formats.
    arguments = {key: value for key, value in arguments.items() if "<" not in value and key == key.strip()}
    tools = {"f": {"properties": {key: {"type": "string"} for key in arguments}}}
    xml = "".join(f"<parameter={k}>\n{v}\n</parameter>" for k, v in arguments.items())
    keys = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    for form, text in (
        (formats.hermes, json.dumps({"name": "f", "arguments": arguments})),
        (formats.qwen3_coder, f"<function=f>{xml}</function>"),
        (formats.glm, f"f{keys}"),
    ):
        reader = AnswerParser(read_call=form, tools=tools)
        [call] = Message().add(reader.push(f"<tool_call>{text}</tool_call>") + reader.finish()).calls
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm"])
@pytest.mark.parametrize(
    "bit",
    [
        "<tool_call>", "<tool_call>f<arg_key>", '<tool_call>{"arguments": {"a": "', '<tool_call>{"name":"f","',
        "<tool_call><function=f><parameter=", "<tool_cal", "\n", "[", '{"name": "f", "arguments": {',
    ],
)  # fmt: skip
def test_a_text_of_nothing_but_beginnings_is_read_in_one_pass(form: str, bit: str):
    """Each character is taken a bounded number of times; going back over the text would take hours here."""
    reader = parser(form)
    reads = 0
    inner = reader.source.next

    def counted():
        nonlocal reads
        reads += 1
        return (yield from inner())

    reader.source.next = counted
    text = bit * (2_000 // len(bit))
    reader.push(text)
    reader.finish()
    assert reads < 30 * len(text)


def test_neighbouring_deltas_of_one_field_are_joined():
    deltas = [
        Text("content", "a"),
        Text("content", "b"),
        CallStart(0, "i", "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
    ]
    assert joined(deltas) == [Text("content", "ab"), CallStart(0, "i", "f"), CallArguments(0, "{}")]
