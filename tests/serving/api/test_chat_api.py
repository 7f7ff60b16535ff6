"""Chats and completions: answers, streams, usage and images."""

import threading
from dataclasses import replace

import pytest

from serving.api import Limits
from serving.chat import ChatTemplate
from serving.metrics import Metrics
from serving.protocol import ErrorEvent, InvalidRequest, Overloaded, SamplingParams, TokenEvent
from serving.tokenizer import Tokenizer
from tests.serving.api.harness import (
    EOS_ID,
    IMAGE_ID,
    LETTER_A,
    PROCESSOR,
    TEXT_CHECKPOINT,
    TOKENIZER,
    FakeEngine,
    app_of,
    chat,
    chunks,
    complete,
    data_uri,
    encoded_image,
    error_of,
    finish,
    image_part,
    text_of,
    until_aborted,
)

ANSWER = "naïve 🙂 answer"


def shown(ids: list[int]) -> str:
    """Prompt ids as text, special tokens in angle brackets."""
    return b"".join(TOKENIZER.token_bytes(i) or f"<{i}>".encode() for i in ids).decode()


def test_a_chat_is_rendered_answered_and_counted():
    engine = FakeEngine(ANSWER)
    turns = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    body = chat(app_of(engine), turns, model="tiny/qwen3-vl", max_tokens=40, temperature=0.5, top_p=0.9, seed=-3).json()

    [submission] = engine.submissions
    assert shown(submission.prompt_ids) == "<257>system\nbe kind<258>\n<257>user\nhi<258>\n<257>assistant\n"
    assert submission.params == SamplingParams(max_tokens=40, temperature=0.5, top_p=0.9, seed=-3)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny/qwen3-vl"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER}
    assert choice["finish_reason"] == "stop"
    prompt_tokens, completion_tokens = len(submission.prompt_ids), len(ANSWER.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 3, "image_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["vitstripe"] == {"vit_calls": []}


def test_a_stream_has_role_pieces_finish_usage_and_done():
    events = chunks(chat(app_of(FakeEngine(ANSWER)), stream=True, stream_options={"include_usage": True}))
    assert events.pop() == "[DONE]"
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    totals = events.pop()
    assert totals["choices"] == []
    assert totals["usage"]["completion_tokens"] == len(ANSWER.encode()) + 1
    assert all(event["usage"] is None for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1]["choices"][0]["delta"] == {}
    assert events[-1]["vitstripe"] == {"vit_calls": []}
    assert text_of(events) == ANSWER


def test_a_stream_without_the_option_has_no_usage():
    events = chunks(chat(app_of(FakeEngine()), stream=True))
    assert not any("usage" in event for event in events[:-1])


@pytest.mark.parametrize("stop", [[], ["🙂"], ["wer", "ï"], ["zzz"], ["naïve 🙂 answer"], ["e 🙂 a", "r"]])
def test_a_stream_says_the_same_as_a_whole_answer(stop: list[str]):
    app = app_of(FakeEngine(ANSWER))
    whole = chat(app, stop=stop).json()
    events = chunks(chat(app, stop=stop, stream=True))
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_a_stop_string_ends_the_request_in_the_engine():
    engine = FakeEngine(script=until_aborted)
    body = chat(app_of(engine), stop="aaa", max_tokens=400).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert set(engine.aborted) == {engine.submissions[0].request_id}


def test_a_stop_string_does_not_wait_for_an_engine_that_says_no_more():
    def says_no_more(submission, send, stopped: threading.Event) -> None:
        for token_id in TOKENIZER.encode_plain("to the END of it"):
            send(TokenEvent(token_id))

    app = app_of(FakeEngine(script=says_no_more), limits=Limits(abort_seconds=0.05))
    body = chat(app, stop=["END"]).json()
    assert body["choices"][0]["message"]["content"] == "to the "
    assert body["usage"]["completion_tokens"] == len("to the END")


def test_an_answer_of_the_greatest_length_says_so():
    body = chat(app_of(FakeEngine("abcdef")), max_completion_tokens=4).json()
    assert body["choices"][0]["message"]["content"] == "abcd"
    assert body["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_the_rest_of_the_context_is_left_for_the_answer():
    engine = FakeEngine(max_model_len=300)
    app = app_of(engine)
    chat(app)
    complete(app)
    assert [s.params.max_tokens for s in engine.submissions] == [300 - len(s.prompt_ids) for s in engine.submissions]


def test_a_completion_takes_text_or_token_ids():
    engine = FakeEngine("ok")
    app = app_of(engine)
    ids = TOKENIZER.encode_plain("once")
    answers = [complete(app, prompt).json() for prompt in ("once", ["once"], ids, [ids])]
    assert [s.prompt_ids for s in engine.submissions] == [ids] * 4
    for answer in answers:
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        assert answer["choices"] == [
            {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]


def test_a_completion_stream_has_text_chunks():
    events = chunks(complete(app_of(FakeEngine(ANSWER)), stream=True))
    assert events[-1] == "[DONE]"
    assert text_of(events) == ANSWER
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert events[-2]["choices"][0] == last


def test_ignore_eos_reaches_the_engine():
    engine = FakeEngine()
    chat(app_of(engine), ignore_eos=True)
    assert engine.submissions[0].params.ignore_eos


# Images


def test_images_are_placed_where_the_chat_has_them():
    engine = FakeEngine("a dog")
    small, large = encoded_image(64, 64), encoded_image(200, 150, "JPEG")
    parts = [
        {"type": "text", "text": "compare "},
        image_part(small),
        {"type": "text", "text": " with "},
        {"type": "input_image", "image_url": data_uri(large, "image/jpeg"), "detail": "high"},
    ]
    response = chat(app_of(engine), parts)
    [submission] = engine.submissions
    sizes = [PROCESSOR.prepare(image).num_tokens for image in (small, large)]
    assert sizes[0] != sizes[1]
    assert [span.image.num_tokens for span in submission.images] == sizes
    for span in submission.images:
        assert submission.prompt_ids[span.start - 1 : span.stop + 1] == [259, *[IMAGE_ID] * span.image.num_tokens, 260]
    assert submission.prompt_ids.count(IMAGE_ID) == sum(sizes)
    assert submission.images[1].image.key == PROCESSOR.prepare(large).key
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == len(submission.prompt_ids)
    assert usage["prompt_tokens_details"]["image_tokens"] == sum(sizes)
    assert response.json()["vitstripe"] == {"vit_calls": [7]}


def test_a_stream_names_the_encoder_calls_in_its_finish_chunk():
    events = chunks(chat(app_of(FakeEngine()), [image_part()], stream=True))
    assert events[-2]["vitstripe"] == {"vit_calls": [7]}


def test_a_typed_placeholder_next_to_an_image_stays_text():
    engine = FakeEngine()
    chat(app_of(engine), [{"type": "text", "text": "<|image_pad|>"}, image_part()])
    [submission] = engine.submissions
    [span] = submission.images
    assert submission.prompt_ids.count(IMAGE_ID) == span.image.num_tokens
    assert submission.prompt_ids[span.start] == IMAGE_ID


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_are_told_by_their_first_bytes_whatever_the_uri_declares(kind: str):
    uri = data_uri(encoded_image(kind=kind), "image/x-anything")
    assert chat(app_of(FakeEngine()), [{"type": "image_url", "image_url": {"url": uri}}]).status_code == 200


PNG = encoded_image(90, 70)
JPEG = encoded_image(90, 70, "JPEG")


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"hello, I am text",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        PNG[:40],
        PNG[:-20] + bytes(20),
        PNG[:29] + b"\0\0\0\0" + PNG[33:],
        JPEG[: len(JPEG) // 2],
        b"\xff\xd8\xff" + bytes(50),
        b"RIFF\0\0\0\0WEBP" + bytes(30),
        b"BM" + bytes(60),
        encoded_image(1, 700),
    ],
    ids=[
        "empty",
        "text",
        "svg",
        "cut png",
        "zeroed tail",
        "bad crc",
        "cut jpeg",
        "jpeg magic",
        "webp magic",
        "bmp magic",
        "too narrow",
    ],
)
def test_an_image_that_cannot_be_used_is_a_400_that_tells_no_internals(encoded: bytes):
    engine = FakeEngine()
    response = chat(app_of(engine), [{"type": "text", "text": "look"}, image_part(encoded)])
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == "messages[0].content[1]"
    assert not any(word in error["message"] for word in ("0x", "PIL", "BytesIO", "Traceback", "object at"))
    assert engine.submissions == []


def test_a_one_pixel_image_is_served():
    assert chat(app_of(FakeEngine()), [image_part(encoded_image(1, 1))]).status_code == 200


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/cat.png", "remote images are off"),
        ("HTTP://10.0.0.1/", "remote images are off"),
        ("file:///etc/passwd", "data URI"),
        ("/etc/passwd", "data URI"),
        ("data:image/png," + "A" * 40, "data URI"),
        ("data:image/png;base64", "data URI"),
        ("data:image/png;base64," + "A" * 43, "base64 is damaged"),
        ("data:image/png;base64,AA AA", "base64 is damaged"),
        ("data:image/png;base64,AAé=", "base64 is damaged"),
        ("data:" + ";a=b" * 5000 + ";base64,AAAA", "data URI"),
        ("", "data URI"),
    ],
)
def test_anything_but_a_good_data_uri_is_a_400(url: str, says: str):
    response = chat(app_of(FakeEngine()), [{"type": "image_url", "image_url": {"url": url}}])
    assert response.status_code == 400
    assert says in error_of(response)["message"]
    assert "passwd" not in response.text


def test_limits_on_images_name_the_value_and_the_limit():
    app = app_of(FakeEngine(), limits=Limits(max_images=2, max_image_bytes=300))
    error = error_of(chat(app, [image_part(PNG)] * 3))
    assert "3 images in one request: the limit is 2" in error["message"]
    assert error["param"] == "messages[0].content[2]"
    too_large = b"\x89PNG\r\n\x1a\n" + bytes(293)
    assert "image of 301 bytes: the limit is 300" in error_of(chat(app, [image_part(too_large)]))["message"]
    assert "the limit is 300" in error_of(chat(app, [image_part(bytes(5000))]))["message"]


def test_images_count_against_the_context():
    engine = FakeEngine(max_model_len=40)
    error = error_of(chat(app_of(engine), [image_part(encoded_image(250, 250))]))
    assert error["code"] == "context_length_exceeded"
    assert "from images" in error["message"]
    assert "context holds 40" in error["message"]
    assert engine.submissions == []


def test_a_text_only_model_refuses_images():
    engine = FakeEngine()
    tokenizer = Tokenizer.from_checkpoint(TEXT_CHECKPOINT)
    template = ChatTemplate.from_checkpoint(TEXT_CHECKPOINT)
    app = app_of(engine, processor=None, tokenizer=tokenizer, template=template)
    error = error_of(chat(app, [image_part()]))
    assert "reads text only" in error["message"]
    assert chat(app, "hello").status_code == 200


def test_images_belong_to_user_turns():
    error = error_of(chat(app_of(FakeEngine()), [{"role": "assistant", "content": [image_part()]}]))
    assert "images may only be in user messages" in error["message"]


def test_a_template_that_drops_images_is_noticed():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    )
    response = chat(app_of(FakeEngine(), template=template), [{"type": "text", "text": "x"}, image_part()])
    assert "placed 0 images, the messages hold 1" in error_of(response)["message"]


def test_a_template_error_is_a_400():
    template = ChatTemplate("{{ raise_exception('no chats today') }}")
    error = error_of(chat(app_of(FakeEngine(), template=template)))
    assert "no chats today" in error["message"]


def test_a_checkpoint_without_a_template_still_completes():
    app = app_of(FakeEngine(), template=None)
    assert "no chat template" in error_of(chat(app))["message"]
    assert complete(app).status_code == 200


# Failures of the engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status"), [(InvalidRequest("does not fit"), 400), (Overloaded("queue is full", retry_after=7.2), 503)]
)
def test_what_the_engine_refuses_has_its_own_status(refusal: Exception, status: int, stream: bool):
    response = chat(app_of(FakeEngine(refuse=refusal)), stream=stream)
    assert response.status_code == status
    assert error_of(response)["message"] == str(refusal)
    assert response.headers.get("retry-after") == ("7" if status == 503 else None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "status"), [("invalid", 400), ("overloaded", 503), ("internal", 500)])
def test_a_failure_before_the_first_token_has_its_own_status(kind, status: int, stream: bool):
    engine = FakeEngine(script=lambda submission, send, stopped: send(ErrorEvent(kind, "at 0x7f00")))
    response = chat(app_of(engine), stream=stream, temperature=0)
    assert response.status_code == status
    assert ("0x7f00" in error_of(response)["message"]) == (kind != "internal")


def test_a_failure_after_the_first_token_is_one_error_event_and_no_done():
    def fails_later(submission, send, stopped: threading.Event) -> None:
        for token_id in TOKENIZER.encode_plain("par"):
            send(TokenEvent(token_id))
        send(ErrorEvent("internal", "secret"))

    app = app_of(FakeEngine(script=fails_later))
    events = chunks(chat(app, stream=True))
    assert text_of(events) == "par"
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["type"] == "internal_error"
    assert "secret" not in str(events)
    assert chat(app).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_server_gave_up_is_an_error_not_a_short_answer(stream: bool):
    def given_up(submission, send, stopped: threading.Event) -> None:
        send(TokenEvent(LETTER_A))
        send(finish(submission, "abort", 1))

    response = chat(app_of(FakeEngine(script=given_up)), stream=stream)
    error = chunks(response)[-1]["error"] if stream else error_of(response)
    assert error["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_an_engine_that_died_get_an_error(stream: bool):
    engine = FakeEngine()

    def dies(submission, send, stopped: threading.Event) -> None:
        send(TokenEvent(LETTER_A))
        engine.state = "dead"

    engine.script = dies
    response = chat(app_of(engine, limits=Limits(watch_seconds=0.02)), stream=stream)
    error = chunks(response)[-1]["error"] if stream else error_of(response)
    assert "engine stopped" in error["message"]


def test_a_long_silence_of_a_living_engine_is_waited_for():
    def slow(submission, send, stopped: threading.Event) -> None:
        stopped.wait(0.3)
        send(TokenEvent(EOS_ID))
        send(finish(submission, "stop", 1))

    response = chat(app_of(FakeEngine(script=slow), limits=Limits(watch_seconds=0.02)))
    assert response.status_code == 200


def test_counts_reach_the_metrics():
    metrics = Metrics()
    app = app_of(FakeEngine("abc"), metrics=metrics)
    chat(app, [image_part()])
    chat(app, stop="b")
    chat(app, temperature=9)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"vitstripe_{name}", labels)

    route = "/v1/chat/completions"
    assert value("http_responses_total", route=route, code="200") == 2
    assert value("http_responses_total", route=route, code="400") == 1
    assert value("requests_rejected_total", reason="invalid_request_error") == 1
    assert value("image_prepare_seconds_count") == 1
    assert value("request_params_max_tokens_count") == 2
    assert value("request_finished_total", reason="stop") == 2
    assert value("generation_tokens_total") == 4 + 2
    assert value("image_tokens_total") == PROCESSOR.prepare(encoded_image()).num_tokens
    assert value("time_to_first_token_seconds_count") == 2
    assert value("inter_token_latency_seconds_count") == 3 + 1
    assert value("e2e_request_latency_seconds_count") == 2


def test_protocol_values_are_checked_where_they_are_made():
    good = SamplingParams(max_tokens=1)
    for field, value in (("max_tokens", 0), ("temperature", 2.1), ("top_p", float("nan")), ("seed", 2**63)):
        with pytest.raises(InvalidRequest, match=field):
            replace(good, **{field: value})
