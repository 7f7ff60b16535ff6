"""Several answers to one request, log-probabilities of their tokens, and echoed prompts."""

import asyncio
import threading

import pytest

from serving.api.delivery import choice_seed
from serving.protocol import ErrorEvent, Overloaded, TokenEvent, TokenLogprobs
from tests.serving.api.harness import (
    EOS_ID,
    TOKENIZER,
    Connection,
    FakeEngine,
    app_of,
    chat,
    chunks,
    complete,
    error_of,
    eventually,
    finish,
    image_part,
    text_of,
    until_aborted,
)

A, B, C = TOKENIZER.encode_plain("abc")


def numbered(submission, send, stopped):
    """A script: each answer says which one it is, by the end of its id; told tokens are worth 1/8 of their place."""
    number = submission.request_id.rpartition("-")[2] if "-" in submission.request_id[9:] else "0"
    told(f"#{number}")(submission, send, stopped)


def told(text, ends=(EOS_ID,)):
    """A script: these tokens, each with log-probabilities if asked for: -i/8 for token i of prompt and answer."""

    def run(submission, send, stopped):
        params, prompt = submission.params, submission.prompt_ids
        ids = [*TOKENIZER.encode_plain(text), *ends][: params.max_tokens]

        def entry(place, token_id, wanted):
            return TokenLogprobs(-place / 8, ((token_id, -place / 8), (B, -50.0), (C, -60.0))[:wanted])

        scored = None
        if params.prompt_logprobs is not None:
            scored = tuple(entry(i, prompt[i], params.prompt_logprobs) for i in range(1, len(prompt)))
        for i, token_id in enumerate(ids):
            logprobs = None if params.logprobs is None else entry(len(prompt) + i, token_id, params.logprobs)
            send(TokenEvent(token_id, logprobs, scored if i == 0 else None))
        ended = len(ids) > 0 and (ids[-1] in ends or ids[-1] in params.stop_token_ids)
        send(finish(submission, "stop" if ended else "length", len(ids)))

    return run


# -- n


def test_n_answers_share_a_prompt_that_counts_once():
    engine = FakeEngine(script=numbered)
    body = chat(app_of(engine), [{"role": "user", "content": ["hi", image_part()][1:]}], n=3, seed=5).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "#0"), (1, "#1"), (2, "#2")]
    first, *others = engine.submissions
    assert all(s.prompt_ids == first.prompt_ids and s.images == first.images for s in others)
    assert body["usage"]["prompt_tokens"] == len(first.prompt_ids)
    assert body["usage"]["completion_tokens"] == 9
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] == first.images[0].image.num_tokens


def test_the_first_choice_has_the_seed_and_the_others_have_their_own_every_time():
    engine = FakeEngine()
    for _ in range(2):
        chat(app_of(engine), n=4, seed=-7)
    seeds = [s.params.seed for s in engine.submissions]
    assert seeds[:4] == seeds[4:]
    assert seeds[0] == -7
    assert len(set(seeds)) == 4
    assert all(-(2**63) <= choice_seed(2**63 - 1, k) < 2**63 for k in range(8))
    chat(app_of(engine), n=2)
    assert [s.params.seed for s in engine.submissions[8:]] == [None, None], "the engine draws one for each"


def test_several_prompts_are_answered_in_order_n_times_each():
    engine = FakeEngine(script=numbered)
    prompts = ["one", TOKENIZER.encode_plain("two"), "three"]
    body = complete(app_of(engine), prompts[::2], n=2).json()
    assert [c["text"] for c in body["choices"]] == ["#0", "#1", "#2", "#3"]
    expected = [TOKENIZER.encode_plain(text) for text in ("one", "one", "three", "three")]
    assert [s.prompt_ids for s in engine.submissions] == expected
    assert body["usage"]["prompt_tokens"] == 8
    ids = complete(app_of(engine), [prompts[1], prompts[1]]).json()
    assert len(ids["choices"]) == 2
    assert error_of(complete(app_of(engine), ["a", ""]))["message"].startswith("prompt is empty")
    assert error_of(complete(app_of(engine), ["a", 5]))["param"] == "prompt"
    assert "the limit is 128" in error_of(complete(app_of(engine), ["a"] * 129))["message"]


def test_streamed_choices_are_told_apart_by_index_and_each_ends_once():
    events = chunks(chat(app_of(FakeEngine(script=numbered)), n=3, stream=True, stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 9
    for index in range(3):
        own = [e for e in events[:-2] if e["choices"][0]["index"] == index]
        assert own[0]["choices"][0]["delta"]["role"] == "assistant"
        assert text_of(own) == f"#{index}"
        reasons = [e["choices"][0]["finish_reason"] for e in own]
        assert reasons == [None] * (len(own) - 1) + ["stop"]
    assert len({e["id"] for e in events[:-1]}) == 1


def test_a_stop_string_ends_its_own_choice_only():
    def run(submission, send, stopped):
        if submission.request_id.endswith("-1"):
            until_aborted(submission, send, stopped)
        else:
            told("bbbb")(submission, send, stopped)

    engine = FakeEngine(script=run)
    body = complete(app_of(engine), n=3, stop="aaa").json()
    assert [c["text"] for c in body["choices"]] == ["bbbb", "", "bbbb"]
    assert [c["stop_reason"] for c in body["choices"]] == [None, "aaa", None]
    assert [s[-2:] for s in engine.aborted] == ["-1"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_all_of_its_answers(stream):
    engine = FakeEngine(script=until_aborted)

    async def run():
        body = {"prompt": ["x", "y"], "n": 4, "stream": stream, "max_tokens": 400}
        connection = Connection(app_of(engine), "/v1/completions", body)
        await eventually(lambda: len(engine.running) == 8)
        connection.leave()
        await eventually(lambda: not engine.running)
        await connection.served

    asyncio.run(run())
    assert len(set(engine.aborted)) == 8


def test_a_queue_that_fills_up_half_way_takes_none_of_the_answers():
    engine = FakeEngine(script=until_aborted)
    submit = engine.submit

    def limited(submission, on_event):
        if len(engine.submissions) == 2:
            raise Overloaded("the queue is full")
        submit(submission, on_event)

    engine.submit = limited
    assert chat(app_of(engine), n=4).status_code == 503
    assert len(engine.aborted) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_of_one_answer_is_told_and_ends_the_others(stream):
    others_run = threading.Event()

    def run(submission, send, stopped):
        if submission.request_id.endswith("-2"):
            others_run.wait(5)
            send(ErrorEvent("internal", "secret"))
        else:
            send(TokenEvent(A))
            others_run.set()
            until_aborted(submission, send, stopped)

    engine = FakeEngine(script=run)
    response = chat(app_of(engine), n=3, stream=stream)
    error = chunks(response)[-1]["error"] if stream else error_of(response)
    assert "secret" not in str(error)
    assert sorted(s[-2:] for s in engine.aborted) == ["-0", "-1"]


# -- log-probabilities


def test_chat_logprobs_have_each_token_once_with_its_bytes():
    engine = FakeEngine(script=told("aé"))
    body = chat(app_of(engine), logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    prompt = len(engine.submissions[0].prompt_ids)
    assert [e["token"] for e in content] == ["a", "�", "�", "<|im_end|>"]
    assert [e["bytes"] for e in content] == [[97], [0xC3], [0xA9], list(b"<|im_end|>")]
    assert [e["logprob"] for e in content] == [-(prompt + i) / 8 for i in range(4)]
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -prompt / 8, "bytes": [97]},
        {"token": "b", "logprob": -50.0, "bytes": [98]},
    ]
    bare = chat(app_of(engine), logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [e["top_logprobs"] for e in bare] == [[]] * 4
    assert chat(app_of(engine)).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("route", [chat, complete])
def test_streamed_logprobs_are_those_of_the_whole_answer(route):
    """Tokens whose text is held back, here one that may begin a stop string and parts of a character, are told too."""
    fields = {"stop": ["zzz"], "logprobs": True if route is chat else 1}
    app = app_of(FakeEngine(script=told("zz🙂b" + "z" * 2)))
    whole = route(app, "hi", **fields).json()["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in chunks(route(app, "hi", stream=True, **fields))[:-1]]
    joined = {key: [x for part in parts if part for x in part[key]] for key in whole if whole[key] is not None}
    assert joined == {key: value for key, value in whole.items() if value is not None}
    assert len(next(iter(joined.values()))) == 10


def test_completion_logprobs_are_parallel_arrays_with_offsets_into_the_text():
    body = complete(app_of(FakeEngine(script=told("a🙂b"))), "hi", logprobs=1).json()["choices"][0]
    told_ = body["logprobs"]
    assert body["text"] == "a🙂b"
    assert told_["tokens"] == ["a", "�", "�", "�", "�", "b", "<|im_end|>"]
    assert told_["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert told_["token_logprobs"] == [-(2 + i) / 8 for i in range(7)]
    assert told_["top_logprobs"][0] == {"a": -2 / 8}


def test_the_chosen_token_is_always_among_the_top_and_equals_keep_the_likeliest():
    part, other = TOKENIZER.encode_plain("🙂")[:2]

    def run(submission, send, stopped):
        send(TokenEvent(A, TokenLogprobs(-3.0, ((part, -0.5), (other, -1.5)))))
        send(finish(submission, "length", 1))

    app = app_of(FakeEngine(script=run))
    logprobs = complete(app, "x", logprobs=2, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"�": -0.5, "a": -3.0}]
    by_id = complete(app, "x", logprobs=2, max_tokens=1, return_tokens_as_token_ids=True).json()
    assert by_id["choices"][0]["logprobs"]["top_logprobs"] == [
        {f"token_id:{part}": -0.5, f"token_id:{other}": -1.5, f"token_id:{A}": -3.0}
    ]


# -- echo


def test_an_echoed_prompt_comes_first_with_its_logprobs():
    engine = FakeEngine(script=told("xy"))
    body = complete(app_of(engine), "héllo", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert body["text"] == "héllox"
    logprobs = body["logprobs"]
    assert logprobs["tokens"] == ["h", "�", "�", "l", "l", "o", "x"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"] == [None, *(-i / 8 for i in range(1, 7))]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"l": -3 / 8}
    assert engine.submissions[0].params.prompt_logprobs == 1


def test_an_end_token_right_after_an_echo_is_told_like_any_other():
    """lm-eval drops the last entry as the generated one; without it a token of the prompt would be lost."""
    logprobs = complete(app_of(FakeEngine(script=told(""))), "ab", echo=True, logprobs=0, max_tokens=1).json()
    assert logprobs["choices"][0]["logprobs"]["tokens"] == ["a", "b", "<|im_end|>"]
    assert logprobs["choices"][0]["text"] == "ab"


def test_a_prompt_can_be_scored_without_an_answer():
    engine = FakeEngine(script=told("xy"))
    body = complete(app_of(engine), ["ab", "cd"], echo=True, logprobs=0, max_tokens=0).json()
    assert [c["text"] for c in body["choices"]] == ["ab", "cd"]
    assert [c["logprobs"]["token_logprobs"] for c in body["choices"]] == [[None, -1 / 8]] * 2
    assert {c["finish_reason"] for c in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    assert [s.params.max_tokens for s in engine.submissions] == [1, 1]
    assert "at least 1" in error_of(complete(app_of(engine), "ab", max_tokens=0))["message"]


def test_a_streamed_echo_is_in_the_first_piece_of_each_choice():
    events = chunks(complete(app_of(FakeEngine(script=told("xy"))), "<|im_end|>é", echo=True, n=2, stream=True))
    for index in range(2):
        own = [e for e in events[:-1] if e["choices"][0]["index"] == index]
        assert own[0]["choices"][0]["text"].startswith("<|im_end|>é")
        assert text_of(own) == "<|im_end|>éxy"


def test_an_echo_without_logprobs_scores_nothing():
    engine = FakeEngine(script=told("x"))
    assert complete(app_of(engine), "ab", echo=True).json()["choices"][0]["text"] == "abx"
    assert engine.submissions[0].params.prompt_logprobs is None


# -- ends


def test_stop_token_ids_end_an_answer_and_their_text_is_not_shown():
    engine = FakeEngine(script=told("ab", ends=(C,)))
    body = complete(app_of(engine), stop_token_ids=[C], logprobs=0).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", C)
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert body["usage"]["completion_tokens"] == 3
    assert engine.submissions[0].params.stop_token_ids == (C,)


def test_the_stop_string_can_be_shown_and_is_told():
    app = app_of(FakeEngine("one END two"))
    hidden = complete(app, stop=["no", "END"]).json()["choices"][0]
    shown = complete(app, stop=["no", "END"], include_stop_str_in_output=True).json()["choices"][0]
    assert (hidden["text"], shown["text"]) == ("one ", "one END")
    assert hidden["stop_reason"] == shown["stop_reason"] == "END"


def test_before_min_tokens_no_stop_string_counts():
    engine = FakeEngine("abcabcabc")
    assert complete(app_of(engine), stop="bc", min_tokens=5).json()["choices"][0]["text"] == "abca"
    assert complete(app_of(engine), stop="bc", min_tokens=6).json()["choices"][0]["text"] == "abcabca"
    assert engine.submissions[0].params.min_tokens == 5


def test_special_tokens_are_shown_on_request_but_never_the_one_that_ends_the_answer():
    app = app_of(FakeEngine(script=told("a", ends=(257, EOS_ID))))
    assert complete(app).json()["choices"][0]["text"] == "a"
    assert complete(app, skip_special_tokens=False).json()["choices"][0]["text"] == "a<|im_start|>"


def test_every_wish_reaches_the_engine():
    engine = FakeEngine()
    wishes = {"top_k": 4, "min_p": 0.25, "presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.25}
    fields = wishes | {"logit_bias": {"5": -100, "7": 2.5}, "min_tokens": 2, "stop_token_ids": [9], "temperature": 0.5}
    assert chat(app_of(engine), **fields, top_p=0.75).status_code == 200
    params = engine.submissions[0].params
    for name, value in wishes.items():
        assert getattr(params, name) == value
    assert params.logit_bias == ((5, -100.0), (7, 2.5))
    assert (params.min_tokens, params.stop_token_ids, params.top_p) == (2, (9,), 0.75)
    assert chat(app_of(engine), top_k=-1).status_code == 200
    assert engine.submissions[1].params.top_k == 0


def test_a_cache_salt_reaches_every_choice_of_its_request_alone():
    engine = FakeEngine()
    assert chat(app_of(engine), cache_salt="of alice", n=2).status_code == 200
    assert complete(app_of(engine), "a").status_code == 200
    assert [submission.cache_salt for submission in engine.submissions] == ["of alice", "of alice", ""]


def test_usage_can_come_with_every_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(chat(app_of(FakeEngine("abc")), stream=True, stream_options=options))
    counts = [e["usage"]["completion_tokens"] for e in events[1:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4
