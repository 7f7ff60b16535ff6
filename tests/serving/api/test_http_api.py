"""Routes, bodies, errors, health and logs."""

import json
import logging
import random
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from serving import tokenizer
from serving.api import Limits
from serving.metrics import Metrics
from tests.serving.api.harness import (
    FakeEngine,
    app_of,
    call,
    chat,
    complete,
    data_uri,
    encoded_image,
    error_of,
    image_part,
)

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
JSON = {"content-type": "application/json"}


def post(raw: bytes | str, path: str = CHAT, engine: FakeEngine | None = None, **headers: str):
    sent = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return call(app_of(engine or FakeEngine()), "POST", path, content=raw, headers=sent)


def user_says(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# Bodies


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b"\xff\xfe{}", "not valid UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "NaN"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"messages": ' + b"[" * 200_000, "nested too deeply"),
    ],
)
def test_a_body_that_is_not_strict_json_is_a_400(raw: bytes, says: str):
    response = post(raw)
    assert response.status_code == 400
    assert says in error_of(response)["message"]


def test_a_surrogate_pair_is_a_character():
    raw = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude42"}]}'
    engine = FakeEngine()
    assert post(raw, engine=engine).status_code == 200
    assert post(raw.replace(b"\\ud83d\\ude42", "🙂".encode()), engine=engine).status_code == 200
    assert engine.submissions[0].prompt_ids == engine.submissions[1].prompt_ids


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": None}, "messages", "is missing"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "hi"}, "messages", "must be a list, not a string"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].role", "needs an assistant message"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role", "must be a string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string or a list"),
        ({"messages": [user_says([])]}, "messages[0].content", "is empty"),
        ({"messages": [user_says([7])]}, "messages[0].content[0]", "must be an object"),
        ({"messages": [user_says([{"type": "audio"}])]}, "messages[0].content[0].type", "must be text"),
        ({"messages": [user_says([{"type": "video"}])]}, "messages[0].content[0].type", "is video: this server takes"),
        ({"messages": [user_says([VIDEO])]}, "messages[0].content[0].type", "takes no videos; send single frames"),
        ({"messages": [user_says([{"type": "text"}])]}, "messages[0].content[0].text", "is missing"),
        ({"messages": [user_says([{"type": "image_url"}])]}, "messages[0].content[0].image_url", "is missing"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]", "function"),
        ({"max_tokens": 0}, "max_tokens", "is 0; it must be at least 1"),
        ({"max_tokens": -5}, "max_tokens", "-5"),
        ({"max_tokens": "5"}, "max_tokens", "must be an integer, not a string"),
        ({"max_tokens": True}, "max_tokens", "must be an integer, not a boolean"),
        ({"max_tokens": 5.0}, "max_tokens", "must be an integer"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send one of them"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"temperature": 2.5}, "temperature", "2.5; it must be from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": False}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "too large"),
        ({"top_p": -0.1}, "top_p", "from 0 to 1"),
        ({"seed": 2**63}, "seed", "64-bit"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"stop": ""}, "stop", "0 characters"),
        ({"stop": ["a"] * 17}, "stop", "17 stop strings: the limit is 16"),
        ({"stop": ["a", 1]}, "stop", "list of strings"),
        ({"stop": "x" * 257}, "stop", "257 characters"),
        ({"model": 3}, "model", "a string"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"n": 0}, "n", "from 1 to 8"),
        ({"n": 9}, "n", "n is 9; it must be from 1 to 8"),
        ({"n": True}, "n", "must be an integer"),
        ({"logprobs": 0}, "logprobs", "true or false"),
        ({"top_logprobs": 2}, "top_logprobs", "only goes with logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21; it must be from 0 to 20"),
        ({"top_k": -2}, "top_k", "0 (off)"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": "a"}, "frequency_penalty", "a number"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 2"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens", "max_tokens, which is 3"),
        ({"min_tokens": 5000}, "min_tokens", "leaves room for"),
        ({"logit_bias": [5]}, "logit_bias", "an object"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "keys are token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "a number"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "not in the vocabulary of 272"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "the limit is 300"),
        ({"stop_token_ids": 5}, "stop_token_ids", "a list of token ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids", "a list of token ids"),
        ({"stop_token_ids": [272]}, "stop_token_ids", "not in the vocabulary of 272"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "the limit is 64"),
        ({"echo": True}, "echo", "not supported"),
        ({"cache_salt": ""}, "cache_salt", "keeps nothing apart"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it(fields: dict[str, Any], param: str, says: str):
    engine = FakeEngine()
    response = call(app_of(engine), "POST", CHAT, content=json.dumps({"messages": USER} | fields), headers=JSON)
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"]
    assert engine.submissions == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("best_of", 3),
        ("suffix", "x"),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"tokenize": True}),
        ("prompt_embeds", "AAAA"),
        ("reasoning_effort", "low"),
        ("guided_regex", "(a+)+"),
    ],
)
def test_what_is_not_built_is_refused_by_name_and_never_ignored(field: str, value: Any):
    engine = FakeEngine()
    for response in (chat(app_of(engine), **{field: value}), complete(app_of(engine), **{field: value})):
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (400, field, "unsupported_value")
    assert engine.submissions == []


def test_values_that_ask_for_nothing_and_unknown_fields_are_fine():
    harmless = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tools": [], "top_k": -1, "echo": False}
    harmless |= {"presence_penalty": 0.0, "frequency_penalty": 0, "stop": None, "max_tokens": None, "logit_bias": None}
    unknown = {"user": "u", "metadata": {"a": 1}, "store": True, "made_up": [1, {}]}
    assert chat(app_of(FakeEngine()), **harmless, **unknown).status_code == 200


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], 5, {"a": 1}, [1, "a"], [1.5], [True], [-1], [272], [10**30], [["a"]]]
)
def test_a_bad_prompt_is_a_400(prompt: Any):
    response = complete(app_of(FakeEngine()), prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


def test_a_prompt_over_the_context_says_tokens_limit_and_what_to_do():
    engine = FakeEngine(max_model_len=50)
    error = error_of(complete(app_of(engine), "x" * 50))
    assert error["code"] == "context_length_exceeded"
    assert "the prompt has 50 tokens" in error["message"]
    assert "context holds 50" in error["message"]
    assert "shorten the prompt" in error["message"]
    error = error_of(complete(app_of(engine), "x" * 40, max_tokens=11))
    assert "lower max_tokens to 10" in error["message"]
    assert complete(app_of(engine), "x" * 40, max_tokens=10).status_code == 200
    assert len(engine.submissions) == 1


def test_texts_far_over_any_context_are_not_tokenised():
    app = app_of(FakeEngine(), limits=Limits(max_text_chars=1000))
    for response in (complete(app, "x" * 1001), chat(app, "x" * 1001)):
        assert "1001 characters: the limit is 1000" in error_of(response)["message"]


@pytest.mark.parametrize("character", ["a", "é", "中", "😀"])
def test_a_prompt_far_over_the_context_is_tokenised_no_further_than_it_takes_to_know(monkeypatch, character):
    """A token takes about 140 bytes while it is made: whole, sixteen megabytes of text took two gigabytes."""
    whole, encoded = tokenizer._encoding, []

    def watched(inner, text: str, **named):
        encoded.append(len(text))
        return whole(inner, text, **named)

    monkeypatch.setattr(tokenizer, "_encoding", watched)
    engine, long = FakeEngine(max_model_len=512), character * 300_000
    for response in (complete(app_of(engine), long), complete(app_of(engine), ["a", long]), chat(app_of(engine), long)):
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "the prompt has more than 512 tokens, the context holds 512" in error["message"]
    assert sum(encoded) < 60_000, "of 900 000 characters"
    assert engine.submissions == []


def test_a_long_text_of_few_tokens_is_no_prompt_far_over_the_context():
    engine = FakeEngine(max_model_len=3000)
    text = "<|im_start|>" * 2900  # 12 characters, one token
    assert complete(app_of(engine), text).status_code == 200
    assert len(engine.submissions[0].prompt_ids) == 2900
    error = error_of(complete(app_of(engine), "<|im_start|>" * 3000))
    assert "the prompt has 3000 tokens, the context holds 3000" in error["message"]


def test_too_many_messages_are_refused():
    error = error_of(chat(app_of(FakeEngine(), limits=Limits(max_messages=3)), USER * 4))
    assert "4 messages: the limit is 3" in error["message"]


def test_a_body_over_the_limit_is_a_413_with_or_without_its_length():
    app = app_of(FakeEngine(), limits=Limits(max_body_bytes=1000, max_preparing_bytes=2000))

    async def in_parts():
        for _ in range(40):
            yield b" " * 50

    for content in (b" " * 1001, in_parts()):
        response = call(app, "POST", CHAT, content=content, headers=JSON)
        assert response.status_code == 413
        assert "the limit is 1000" in error_of(response)["message"]
    assert chat(app).status_code == 200


def test_only_plain_json_bodies_are_taken():
    assert error_of(post("{}", content_type="text/plain"))["message"].startswith("the body must be JSON")
    assert post("{}", content_encoding="gzip").status_code == 415
    assert post(json.dumps({"messages": USER}), content_type="application/json; charset=utf-8").status_code == 200


def mutated(choice: random.Random, value: Any, depth: int = 0) -> Any:
    """`value` with parts swapped, dropped or replaced by junk."""
    junk = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**70,
        1.5,
        "",
        "\0",
        "x" * 300,
        "<|image_pad|>",
        [],
        {},
        [[]],
        [None],
        {"type": "text"},
    ]
    if depth and choice.random() < 0.25:
        return choice.choice(junk)
    if isinstance(value, dict):
        kept = {key: mutated(choice, inner, depth + 1) for key, inner in value.items() if choice.random() > 0.05}
        if choice.random() < 0.1:
            kept[choice.choice(["role", "content", "type", "text", "image_url", "stop", "n", "stream"])] = (
                choice.choice(junk)
            )
        return kept
    if isinstance(value, list):
        return [mutated(choice, inner, depth + 1) for inner in value] * choice.choice([1, 1, 1, 2])
    return value


def test_malformed_bodies_are_never_a_fault_of_the_server():
    engine = FakeEngine("x", max_model_len=5000)
    app = app_of(engine)
    picture = data_uri(encoded_image(40, 40))
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": picture, "detail": "low"}}]
    common = {"model": "tiny/qwen3-vl", "max_tokens": 3, "temperature": 0.5, "top_p": 1, "stop": ["a", "b"], "seed": 4}
    common |= {"stream": True, "stream_options": {"include_usage": True}, "n": 1, "logprobs": False}
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a"},
    ]
    bodies = {CHAT: common | {"messages": turns}, "/v1/completions": common | {"prompt": [1, 2, 3]}}
    choice = random.Random(5)
    statuses = set()
    for _ in range(250):
        path = choice.choice(list(bodies))
        raw = json.dumps(mutated(choice, bodies[path])).encode()
        if choice.random() < 0.2:
            cut = choice.randrange(len(raw))
            raw = raw[:cut] + bytes([choice.randrange(256)]) + raw[cut + choice.randrange(2) :]
        response = call(app, "POST", path, content=raw, headers=JSON)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), (response.status_code, raw[:500])
        if response.status_code != 200:
            error_of(response)
    assert statuses >= {200, 400}
    assert chat(app).status_code == 200


# Routes


def test_unknown_routes_and_methods_have_the_same_error_shape():
    app = app_of(FakeEngine())
    for method, path, status in (
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", CHAT + "/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ):
        response = call(app, method, path)
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"
    assert call(app, "GET", CHAT).headers["allow"] == "POST"


def test_models_are_listed_and_looked_up_by_a_name_with_a_slash():
    app = app_of(FakeEngine())
    [entry] = call(app, "GET", "/v1/models").json()["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("tiny/qwen3-vl", "model", 512)
    assert call(app, "GET", "/v1/models/tiny/qwen3-vl").json() == entry
    response = call(app, "GET", "/v1/models/other")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_another_model_is_a_404_and_no_model_is_fine():
    engine = FakeEngine()
    for response in (chat(app_of(engine), model="gpt-4"), complete(app_of(engine), model="gpt-4")):
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert engine.submissions == []


@pytest.mark.parametrize(
    ("state", "age", "health", "ready"),
    [
        ("ready", 1.0, 200, 200),
        ("ready", 30.0, 200, 200),
        ("ready", 121.0, 503, 503),
        ("starting", 1.0, 200, 503),
        ("draining", 1.0, 200, 503),
        ("dead", 1.0, 503, 503),
    ],
)
def test_health_and_readiness_follow_the_engine(state: str, age: float, health: int, ready: int):
    app = app_of(FakeEngine(state=state, heartbeat_age=age), limits=Limits(heartbeat_seconds=120.0))
    for path, status in (("/health", health), ("/ready", ready)):
        response = call(app, "GET", path)
        assert response.status_code == status
        if status == 503:
            assert state in error_of(response)["message"]
            assert "as the test says" in error_of(response)["message"]


@pytest.mark.parametrize("state", ["starting", "draining", "dead"])
def test_requests_are_only_taken_when_ready(state: str):
    engine = FakeEngine(state=state)
    response = chat(app_of(engine))
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert state in error_of(response)["message"]
    assert engine.submissions == []


def test_metrics_are_in_prometheus_text_and_start_at_zero():
    metrics = Metrics()
    metrics.vit_call(images=5, lanes_filled=3, padded_ratio=0.25)
    metrics.indexer_rows("striped", 640)
    metrics.spent("wait", 0.25)
    metrics.compile("before_ready", 4)
    metrics.set_queue(running=2, waiting=1)
    metrics.set_pages(used=7, total=90)
    metrics.encoder_cache(hits=1, misses=5)
    response = call(app_of(FakeEngine(), metrics=metrics), "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = set(response.text.splitlines())
    assert {
        "vitstripe_vit_calls_total 1.0",
        "vitstripe_vit_images_per_call_sum 5.0",
        "vitstripe_vit_lanes_filled_sum 3.0",
        "vitstripe_vit_padded_patch_ratio_sum 0.25",
        'vitstripe_indexer_rows_total{path="striped"} 640.0',
        'vitstripe_engine_seconds_total{doing="wait"} 0.25',
        'vitstripe_indexer_rows_total{path="replicated"} 0.0',
        'vitstripe_compiles_total{stage="before_ready"} 4.0',
        'vitstripe_compiles_total{stage="after_ready"} 0.0',
        "vitstripe_num_requests_running 2.0",
        "vitstripe_num_requests_waiting 1.0",
        "vitstripe_kv_pages_used 7.0",
        "vitstripe_encoder_cache_misses_total 5.0",
    } <= lines


def test_our_own_fault_is_a_500_with_a_fixed_text_and_the_request_id(caplog):
    engine = FakeEngine(refuse=RuntimeError("secret detail"))
    with caplog.at_level(logging.ERROR):
        response = call(app_of(engine), "POST", CHAT, json={"messages": USER}, headers={"x-request-id": "abc-1"})
    assert response.status_code == 500
    assert error_of(response)["type"] == "internal_error"
    assert "abc-1" in error_of(response)["message"]
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


def test_request_ids_are_kept_if_plain_and_made_otherwise():
    app = app_of(FakeEngine())
    assert call(app, "GET", "/health", headers={"x-request-id": "job-7.a_b"}).headers["x-request-id"] == "job-7.a_b"
    for bad in ("a b", "x" * 129, "{}", ""):
        made = call(app, "GET", "/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(made) == 32


def test_looking_at_the_server_is_neither_logged_nor_counted_as_rejected(caplog):
    app = app_of(FakeEngine(state="starting"))
    with caplog.at_level(logging.INFO):
        assert [call(app, "GET", path).status_code for path in ("/ready", "/health", "/metrics")] == [503, 200, 200]
        assert call(app, "POST", CHAT, json={"messages": USER}).status_code == 503
    assert [json.loads(r.message)["route"] for r in caplog.records if r.name == "serving.http"] == [CHAT]
    rejected = [line for line in call(app, "GET", "/metrics").text.splitlines() if "reject" in line and line[0] != "#"]
    assert rejected
    assert sum(float(line.split()[-1]) for line in rejected if "_created" not in line) == 1


def test_two_requests_with_one_request_id_are_two_requests_in_the_engine():
    engine = FakeEngine()
    for _ in range(2):
        call(app_of(engine), "POST", CHAT, json={"messages": USER}, headers={"x-request-id": "same"})
    assert len({submission.request_id for submission in engine.submissions}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_one_line_a_request_with_counts_and_no_payload(caplog, stream: bool):
    with caplog.at_level(logging.DEBUG):
        chat(app_of(FakeEngine("marvellous")), [{"type": "text", "text": "confidential"}, image_part()], stream=stream)
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "serving.http"]
    assert (line["status"], line["route"], line["images"], line["finish_reason"]) == (200, CHAT, 1, "stop")
    assert line["completion_tokens"] == len("marvellous") + 1
    assert line["prompt_tokens"] > line["image_tokens"] > 0
    assert not any(text in caplog.text for text in ("confidential", "marvellous", "base64"))


def test_further_routes_get_the_same_treatment():
    app = app_of(FakeEngine(), extra_routes=[Route("/extra", lambda request: PlainTextResponse("ok"))])
    response = call(app, "GET", "/extra")
    assert (response.text, len(response.headers["x-request-id"])) == ("ok", 32)


def test_limits_are_checked_where_they_are_made():
    for field, value in (("max_images", 0), ("heartbeat_seconds", float("inf")), ("image_workers", -1)):
        with pytest.raises(ValueError, match=f"{field} is {value}; it must be a positive number"):
            Limits(**{field: value})
    with pytest.raises(ValueError, match="max_preparing_bytes is 1000, less than one body"):
        Limits(max_preparing_bytes=1000)
