"""The served OpenAPI document says what the server does."""

import json
from typing import Any

import jsonschema
import pytest

from serving.api import Limits
from serving.api.errors import ApiError
from serving.api.openapi import document
from serving.api.prompts import chat_prompt
from serving.api.schemas import ONLY_IN_CHATS, ONLY_IN_COMPLETIONS, REFUSED, parse_chat, parse_completion
from serving.chat import choose_parsers
from tests.serving.api.harness import TOKENIZER, FakeEngine, app_of, call, chat, chunks, complete, image_part
from tests.serving.api.tool_models import HERMES, WEATHER

DOCUMENT = document(Limits(), "tiny")
USER = [{"role": "user", "content": "hi"}]
BODIES = {"ChatRequest": {"messages": USER}, "CompletionRequest": {"prompt": "hi"}}


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema)


def takes(name: str, body: dict[str, Any]) -> bool:
    """Whether the server would generate an answer to a body."""
    raw = json.dumps(body).encode()
    try:
        if name == "ChatRequest":
            chat_prompt(parse_chat(raw, Limits()), [], HERMES, TOKENIZER, 4096)
        else:
            parse_completion(raw, Limits())
    except ApiError as error:
        return error.status != 400
    return True


def test_the_document_is_served_and_has_every_route():
    app = app_of(FakeEngine())
    served = call(app, "GET", "/openapi.json").json()
    assert served["info"]["description"].count("tiny/qwen3-vl") == 1
    assert served["paths"] == DOCUMENT["paths"]
    routes = {route.path.replace("{model:path}", "{model}") for route in app.routes}
    assert set(served["paths"]) == routes - {"/openapi.json"}


def test_every_schema_is_a_schema_and_every_reference_leads_somewhere():
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(DOCUMENT)
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in DOCUMENT["components"]["schemas"]


VALUES = [
    None, True, False, 0, 1, -1, 2, 8, 9, 20, 21, 2.5, 0.5, -2.1, 2**31, 2**63, -(2**63), "", "x", "none", "auto",
    "high", "x" * 257, [], ["a"], [""], ["a"] * 17, [5], [-5], [1] * 65, [[]], {}, {"5": 1}, {"5": 101}, {"x": 1},
    {"5": "1"}, {"type": "text"}, {"include_usage": True}, {"include_usage": 1}, {"enable_thinking": True},
    {"enable_thinking": 1}, {"tokenize": False}, [WEATHER], [{"type": "function"}], [{"type": "x"}], ["text"],
]  # fmt: skip
# What the model at hand refuses, or what depends on other fields or on the prompt; the document says so in words.
BY_CONTEXT = {
    "max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs", "reasoning_effort", "logit_bias",
    "stop_token_ids", "model", "prompt", "messages",
}  # fmt: skip


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest"])
def test_each_field_takes_exactly_the_values_that_the_document_says(name: str):
    fields = DOCUMENT["components"]["schemas"][name]["properties"]
    checked = validator(name)
    for field in sorted(fields.keys() - BY_CONTEXT):
        for value in VALUES:
            body = BODIES[name] | {field: value} | ({"stream": True} if field == "stream_options" else {})
            assert takes(name, body) == checked.is_valid(body), (field, value)


def test_no_field_is_known_to_the_parser_alone():
    for name, extra in (("ChatRequest", ONLY_IN_COMPLETIONS), ("CompletionRequest", ONLY_IN_CHATS)):
        fields = DOCUMENT["components"]["schemas"][name]["properties"]
        assert fields.keys() >= REFUSED.keys() | extra.keys()


@pytest.mark.parametrize(
    ("messages", "fits"),
    [
        (USER, True),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, image_part()]}], True),
        ([{"role": "developer", "content": [{"type": "input_text", "text": "a"}]}, *USER], True),
        ([*USER, {"role": "assistant", "content": None, "tool_calls": []}], True),
        ([*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
          {"role": "tool", "content": "4", "tool_call_id": "a"}], True),
        ([], False),
        ([{"role": "robot", "content": "x"}], False),
        ([{"role": "user", "content": None}], False),
        ([{"role": "user", "content": []}], False),
        ([{"role": "user", "content": [{"type": "text"}]}], False),
        ([{"role": "system", "content": [image_part()]}, *USER], False),
        ([*USER, {"role": "assistant", "content": 5}], False),
        ([*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}], False),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], False),
    ],
)  # fmt: skip
def test_messages_fit_the_document_where_the_server_takes_them(messages: list[Any], fits: bool):
    assert validator("ChatRequest").is_valid({"messages": messages}) == fits
    response = chat(app_of(FakeEngine("x", max_model_len=5000), template=HERMES), messages or [])
    if messages:
        assert (response.status_code == 200) == fits, response.text


@pytest.mark.parametrize("prompt", ["x", [1], ["x", [1]], [[1], "x"], "", [], [[]], [""], [1, "x"], 5, None, {}])
def test_prompts_fit_the_document_where_the_server_takes_them(prompt: Any):
    status = complete(app_of(FakeEngine("x")), prompt).status_code
    assert status == (200 if validator("CompletionRequest").is_valid({"prompt": prompt}) else 400)


ANSWER = 'So <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"tools": [WEATHER]}])
def test_chats_answer_as_the_document_says(fields: dict[str, Any]):
    app = app_of(FakeEngine(ANSWER, max_model_len=5000), template=HERMES, parsers=choose_parsers(HERMES, {}))
    validator("ChatAnswer").validate(chat(app, **fields).json())
    for event in chunks(chat(app, stream=True, stream_options={"include_usage": True}, **fields))[:-1]:
        validator("ChatChunk").validate(event)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"echo": True}, {"logprobs": 2}])
def test_completions_answer_as_the_document_says(fields: dict[str, Any]):
    app = app_of(FakeEngine("ok"))
    validator("CompletionAnswer").validate(complete(app, **fields).json())
    for event in chunks(complete(app, stream=True, **fields))[:-1]:
        validator("CompletionChunk").validate(event)


def test_other_routes_answer_as_the_document_says():
    app = app_of(FakeEngine())
    for path, name in (
        ("/v1/models", "Models"),
        ("/health", "State"),
        ("/ready", "State"),
        ("/health_generate", "Probe"),
    ):
        validator(name).validate(call(app, "GET", path).json())
    validator("Model").validate(call(app, "GET", "/v1/models/tiny/qwen3-vl").json())
    validator("Error").validate(call(app, "GET", "/nowhere").json())
    validator("Error").validate(call(app, "POST", "/start_profile").json())
