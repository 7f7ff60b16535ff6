"""Tools, reasoning and template switches over HTTP."""

import json
from typing import Any

import pytest

from serving.chat import ChatTemplate, choose_parsers
from tests.serving.api.harness import TOKENIZER, FakeEngine, app_of, chat, chunks, complete, error_of
from tests.serving.api.tool_models import GLM, HERMES, WEATHER

CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich", "days": 3}}\n</tool_call>'
TURNS = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "look it up",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"place": "<|im_end|>"}'},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "5 °"}],
    },
]


def app(answer: str, template: ChatTemplate = HERMES, **other: Any):
    engine = FakeEngine(answer, max_model_len=4000, **other)
    return engine, app_of(engine, template=template, parsers=choose_parsers(template, {}))


def prompt(engine: FakeEngine) -> str:
    return b"".join(TOKENIZER.token_bytes(i, special=True) for i in engine.submissions[-1].prompt_ids).decode()


def put_together(events: list[Any]) -> dict[str, Any]:
    """The message of a stream, put together as a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        for field in ("content", "reasoning_content"):
            message[field] += delta.get(field, "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                assert part["function"]["name"]
                assert part["type"] == "function"
                message["tool_calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            else:
                assert set(part) == {"index", "function"}
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return message


@pytest.mark.parametrize("text", ["", "Let me look.\n"])
def test_a_call_is_read_from_the_answer(text: str):
    _, api = app(f"{text}{CALL}\n{CALL}")
    [choice] = chat(api, "weather?", tools=[WEATHER]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (text.strip() or None)
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["function"]["name"]) == ("function", "weather")
    assert json.loads(first["function"]["arguments"]) == {"place": "Zürich", "days": 3}
    assert first["id"] != second["id"]


def test_a_stream_of_calls_says_the_same_as_the_whole_answer():
    _, api = app(f"So.\n{CALL}\n{CALL}")
    events = chunks(chat(api, "weather?", tools=[WEATHER], stream=True))
    message = put_together(events)
    assert message["content"] == "So."
    assert [call["name"] for call in message["tool_calls"]] == ["weather", "weather"]
    assert all(json.loads(call["arguments"]) == {"place": "Zürich", "days": 3} for call in message["tool_calls"])
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_reach_the_template_as_they_were_sent_and_stay_text():
    engine, api = app("ok")
    tool = {"function": WEATHER["function"] | {"description": "ends <|im_end|> here", "x": None}, "type": "function"}
    assert chat(api, "hi", tools=[tool]).status_code == 200
    assert json.dumps(tool, ensure_ascii=False) in prompt(engine)
    ids = engine.submissions[0].prompt_ids
    assert ids.count(258) == 2, "the tool's text must not end a turn"


def test_past_calls_and_their_answers_go_back_into_the_template():
    engine, api = app("It is sunny.")
    body = chat(api, TURNS, tools=[WEATHER]).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "It is sunny."}
    shown = prompt(engine)
    assert '{"name": "weather", "arguments": {"place": "<|im_end|>"}}\n</tool_call><|im_end|>' in shown
    assert "tool\nsun\n5 °<|im_end|>" in shown
    engine, api = app("x", GLM)
    chat(api, TURNS, tools=[WEATHER])
    assert "assistant\n<think>look it up</think><tool_call>weather<arg_key>place</arg_key>" in prompt(engine)


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_nothing_is_told_and_nothing_is_read(fields: dict[str, Any]):
    engine, api = app(CALL)
    [choice] = chat(api, "hi", **fields).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "<tools>" not in prompt(engine)


def test_one_call_at_a_time_ends_the_answer_in_the_engine():
    _, api = app(f"{CALL}\n{CALL} and more")
    [choice] = chat(api, "hi", tools=[WEATHER], parallel_tool_calls=False).json()["choices"]
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")


def test_a_call_that_the_length_cut_ends_with_length():
    _, api = app(CALL)
    [choice] = chat(api, "hi", tools=[WEATHER], max_tokens=50).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith("{")


def test_stop_strings_do_not_reach_into_reasoning_or_calls():
    _, api = app(f"<think>END?</think>Well END {CALL}")
    [choice] = chat(api, "hi", tools=[WEATHER], stop=["END", "Zürich"]).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Well ", "reasoning_content": "END?"}
    _, api = app(CALL)
    [choice] = chat(api, "hi", tools=[WEATHER], stop=["Zürich"]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"


# Reasoning


def test_reasoning_is_a_field_of_its_own_and_counted():
    _, api = app("hm é</think>\n\nFour.", GLM)
    body = chat(api, "2+2?").json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Four.", "reasoning_content": "hm é"}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm é</think>".encode())
    message = put_together(chunks(chat(api, "2+2?", stream=True)))
    assert (message["content"], message["reasoning_content"]) == ("Four.", "hm é")


@pytest.mark.parametrize(
    ("switches", "tail", "reasoning"),
    [
        ({}, "assistant\n", None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<think>\n", "hi"),
        ({"chat_template_kwargs": {"thinking": True}}, "<think>\n", "hi"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n", None),
        ({"reasoning_effort": "none"}, "</think>\n\n", None),
    ],
)
def test_the_prompts_end_decides_what_is_reasoning(switches: dict[str, Any], tail: str, reasoning: str | None):
    engine, api = app("hi")
    message = chat(api, "x", **switches).json()["choices"][0]["message"]
    assert prompt(engine).endswith(tail)
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == (None if reasoning else "hi")


# What is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER | {"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"clear_thinking": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_400_that_names_it(fields: dict[str, Any], param: str):
    engine, api = app("x")
    response = chat(api, "hi", **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert engine.submissions == []


def test_a_template_without_tools_or_switches_refuses_them():
    api = app_of(FakeEngine())
    assert "takes no tools" in error_of(chat(api, "hi", tools=[WEATHER]))["message"]
    error = error_of(chat(api, "hi", chat_template_kwargs={"enable_thinking": True}))
    assert "does not read enable_thinking" in error["message"]
    for field, value in (("tools", [WEATHER]), ("reasoning_effort", "low"), ("chat_template_kwargs", {"x": 1})):
        assert error_of(complete(api, "hi", **{field: value}))["param"] == field


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


def calling(function: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        (calling({"name": "f", "arguments": "[1]"}), ARGUMENTS),
        (calling({"name": "f", "arguments": "{"}), ARGUMENTS),
        (calling({"name": "f", "arguments": '{"a": NaN}'}), ARGUMENTS),
        (calling({"name": "f", "arguments": '{"a": "\\ud800"}'}), ARGUMENTS),
        (calling({"name": "f", "arguments": '{"a": ' * 40 + "1" + "}" * 40}), ARGUMENTS),
        (calling({"name": "f", "arguments": 5}), ARGUMENTS),
        (calling({"arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "reasoning_content": 5}, "messages[1].reasoning_content"),
        ({"role": "tool", "content": "x"}, "messages[1].role"),
    ],
)  # fmt: skip
def test_turns_around_tools_are_checked(turn: dict[str, Any], param: str):
    _, api = app("x")
    response = chat(api, [{"role": "user", "content": "hi"}, turn])
    assert (response.status_code, error_of(response)["param"]) == (400, param)


# Which parser


@pytest.mark.parametrize(
    ("template", "model_type", "tools", "reasoning"),
    [
        (HERMES, "", "hermes", True),
        (GLM, "", "glm", True),
        (ChatTemplate("<function=x></function> <tool_call>"), "qwen3_moe", "qwen3_coder", False),
        (ChatTemplate("{{ messages[0].content }}"), "qwen3_vl", "hermes", False),
        (ChatTemplate("{{ messages[0].content }}"), "qwen3_5_moe", "qwen3_coder", False),
        (ChatTemplate("{{ messages[0].content }}"), "glm_moe_dsa", "glm", False),
        (ChatTemplate("{{ messages[0].content }}"), "other", "none", False),
        (None, "other", "none", False),
    ],
)
def test_parsers_go_by_the_template_or_else_by_the_family(template, model_type: str, tools: str, reasoning: bool):
    chosen = choose_parsers(template, {"model_type": model_type})
    assert (chosen.tools, chosen.reasoning) == (tools, reasoning)


def test_a_parser_can_be_named():
    assert choose_parsers(HERMES, {}, tools="glm45", reasoning="none") == choose_parsers(GLM, {}, reasoning="none")
    assert choose_parsers(HERMES, {}, tools="none").tools == "none"
    for name in ("tools", "reasoning"):
        with pytest.raises(ValueError, match="is not known; choose one of auto"):
            choose_parsers(None, {}, **{name: "llama"})


def test_a_parser_that_is_off_gives_the_raw_text_back():
    engine = FakeEngine(CALL, max_model_len=4000)
    api = app_of(engine, template=HERMES)
    message = chat(api, "hi", tools=[WEATHER]).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALL}
