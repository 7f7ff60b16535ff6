"""The `openai` package against the server: what it sends is understood, what it gets back it understands."""

import asyncio
import base64
import time

import numpy as np
import openai
import pytest

from serving.protocol import Overloaded
from tests.serving.clients.served import MODEL
from tests.serving.demo_server import DIGITS, PHOTOS


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def image(path):
    encoded = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{path.suffix[1:]};base64,{encoded}"}}


def question(path, text="digit?"):
    return [{"role": "user", "content": [image(path), {"type": "text", "text": text}]}]


def label(path):
    return path.name.split("_")[1]


def read(client, path, **options):
    return client.chat.completions.create(model=MODEL, messages=question(path), temperature=0, max_tokens=4, **options)


def test_the_model_is_listed_and_found(client):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("other")
    assert refusal.value.code == "model_not_found"


def test_a_chat_about_an_image(client):
    answer = read(client, DIGITS[7])
    assert answer.choices[0].message.content == label(DIGITS[7])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 4


def test_two_images_in_one_chat(client):
    content = [image(DIGITS[0]), image(DIGITS[4]), {"type": "text", "text": "digit?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=3
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_stream_ends_with_its_usage(client):
    stream = read(client, DIGITS[2], stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == label(DIGITS[2])
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2
    assert len({c.id for c in chunks}) == 1


def test_the_streaming_helper_puts_an_answer_together(client):
    options = {"model": MODEL, "messages": question(DIGITS[3]), "temperature": 0, "max_tokens": 4}
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == label(DIGITS[3])


def test_several_answers_with_a_seed(client):
    def ask():
        answer = client.chat.completions.create(
            model=MODEL,
            messages=question(PHOTOS[0], "?"),
            n=4,
            temperature=2.0,
            seed=11,
            max_tokens=9,
            extra_body={"ignore_eos": True},
        )
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.completion_tokens == 36
        return [c.message.content for c in answer.choices]

    first = ask()
    assert len(set(first)) == 4
    assert ask() == first


def test_streamed_answers_are_those_of_the_whole_body(client):
    options = {"n": 3, "temperature": 1.5, "seed": 5, "extra_body": {"ignore_eos": True, "top_k": 30, "min_p": 0.001}}
    whole = client.chat.completions.create(model=MODEL, messages=question(DIGITS[1]), max_tokens=7, **options)
    texts = [""] * 3
    for chunk in client.chat.completions.create(
        model=MODEL, messages=question(DIGITS[1]), max_tokens=7, stream=True, **options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]


def test_logprobs_of_a_chat(client):
    answer = read(client, DIGITS[5], logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs.content
    assert [t.token for t in told] == [label(DIGITS[5]), "<|im_end|>"]
    for token in told:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob, "greedy: the chosen one is the best"
        values = [t.logprob for t in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert np.exp(values).sum() <= 1 + 1e-6
        assert bytes(token.bytes).decode() == token.token


def test_completions_take_text_ids_and_lists_of_them(client, served):
    ids = served.server.tokenizer.encode_plain("once")
    options = {"model": MODEL, "max_tokens": 5, "temperature": 0, "extra_body": {"ignore_eos": True}}
    one = client.completions.create(prompt="once", **options)
    assert client.completions.create(prompt=ids, **options).choices[0].text == one.choices[0].text
    many = client.completions.create(prompt=["once", "twice", "once"], n=2, **options)
    assert [c.index for c in many.choices] == list(range(6))
    assert {many.choices[k].text for k in (0, 1, 4, 5)} == {one.choices[0].text}
    assert many.usage.prompt_tokens == 13


def test_a_stop_string_and_special_stops(client):
    base = {"model": MODEL, "prompt": "abc", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**base, extra_body={"ignore_eos": True, "skip_special_tokens": False}).choices[0]
    assert len(whole.text) > 3
    cut = client.completions.create(
        **base, stop=whole.text[2:4], extra_body={"ignore_eos": True, "skip_special_tokens": False}
    ).choices[0]
    assert cut.text == whole.text[: whole.text.index(whole.text[2:4])]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "not served here"),
        ({"temperature": 9}, openai.BadRequestError, "from 0 to 2"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "context of 176"),
        ({"messages": []}, openai.BadRequestError, "messages is empty"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "not supported"),
        ({"n": 99}, openai.BadRequestError, "from 1 to 8"),
    ],
)
def test_faults_raise_the_exception_of_their_kind(client, fields, error, says):
    with pytest.raises(error, match=says) as refusal:
        client.chat.completions.create(
            **{"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | fields
        )
    assert refusal.value.body["type"] == "invalid_request_error"


def test_a_broken_image_names_its_place(client):
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    ]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert refusal.value.param == "messages[0].content[0]"


def test_a_full_queue_is_a_rate_limit_error_that_says_when(client, served, monkeypatch):
    def full(submission, on_event):
        raise Overloaded("256 requests are waiting", retry_after=3.0, reason="queue_full")

    monkeypatch.setattr(served.engine, "submit", full)
    with pytest.raises(openai.RateLimitError) as refusal:
        read(client, DIGITS[0])
    assert refusal.value.response.headers["retry-after"] == "3"


def test_a_client_that_gives_up_leaves_nothing_behind(client, served):
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            model=MODEL,
            messages=question(PHOTOS[0]),
            n=4,
            max_tokens=90,
            timeout=0.05,
            extra_body={"ignore_eos": True},
        )
    deadline = time.monotonic() + 60
    while served.engine._known and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not served.engine._known


def test_sixty_four_at_once_each_get_their_own_answer(served):
    async def burst():
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=300) as client:

            async def ask(path):
                answer = await client.chat.completions.create(
                    model=MODEL, messages=question(path), temperature=0, max_tokens=4
                )
                return answer.choices[0].message.content

            paths = [DIGITS[i % len(DIGITS)] for i in range(64)]
            return [(label(p), text) for p, text in zip(paths, await asyncio.gather(*map(ask, paths)), strict=True)]

    answers = asyncio.run(burst())
    assert [(wanted, got) for wanted, got in answers if wanted != got] == []
    assert len({wanted for wanted, _ in answers}) >= 8
