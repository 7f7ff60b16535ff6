"""Sampling wishes and log-probabilities end to end: what the server tells is what the decoder computes.

The reference is the decoder's own programs run token by token by `tests.serving.harness.Driver`, its logits put through
a log-softmax and the definitions restated here, in float64.
"""

import json
import urllib.request

import numpy as np
import pytest

from serving.cli import DIGITS_FOLDER
from serving.config import EngineConfig
from serving.protocol import SamplingParams
from tests.serving.harness import Driver
from vitstripe.checkpoint import Checkpoint

PROMPTS = ["the quick brown fox jumps over it", "abracadabra " * 13, "7", "naïve 🙂 café"]


@pytest.fixture(scope="module")
def logits_of(served):
    """ids -> logits [T, V] of a text."""
    no_images = np.zeros((8, 3 * 64), np.float32)
    config = EngineConfig(max_model_len=176, page_size=8, max_seqs=32, prefill_tokens=64)
    with served.reference():
        driver = Driver(Checkpoint(DIGITS_FOLDER), 2, no_images, config)

    def compute(ids):
        with served.reference():
            return driver.prefill(driver.sequence(ids), list(range(32, len(ids), 32)))

    return compute


@pytest.fixture
def complete(served):
    def post(**fields):
        body = json.dumps({"model": "digits"} | fields).encode()
        request = urllib.request.Request(f"{served.url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    return post


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def ids_of(served, text):
    return served.server.tokenizer.encode_prompt(text)


def test_an_echoed_prompt_is_scored_as_the_decoder_scores_it(served, complete, logits_of):
    """The request that lm-eval sends for loglikelihoods, prompts longer than a prefill pass among them."""
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 3, "echo": True, "seed": 1234}
    body = complete(
        prompt=[ids_of(served, text) for text in PROMPTS],
        return_tokens_as_token_ids=True,  # parts of characters look alike as text
        **fields,
    )
    assert max(len(ids_of(served, text)) for text in PROMPTS) > served.server.runner.config.prefill_tokens
    for text, choice in zip(PROMPTS, body["choices"], strict=True):
        ids, told = ids_of(served, text), choice["logprobs"]
        expected = log_softmax(logits_of(ids))
        assert len(told["tokens"]) == len(ids) + 1
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        values = np.array(told["token_logprobs"][1:])
        chosen = [*ids[1:], int(expected[-1].argmax())]
        np.testing.assert_allclose(values, expected[np.arange(len(ids)), chosen], rtol=0, atol=1e-4)
        for row, (value, top) in enumerate(zip(values, told["top_logprobs"][1:], strict=True)):
            ordered = sorted(top.values(), reverse=True)
            np.testing.assert_allclose(ordered[:3], np.sort(expected[row])[::-1][:3], rtol=0, atol=1e-4)
            # Greedy exactly where the two are the same number.
            assert (value == max(ordered)) == (chosen[row] == expected[row].argmax())


def test_scores_are_the_same_in_company_and_again(served, complete):
    """A cached prefix has no logits any more, and a neighbour must not move a number."""
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    ids = ids_of(served, PROMPTS[1])
    alone = complete(prompt=ids, **fields)["choices"][0]["logprobs"]
    complete(prompt=ids, max_tokens=3, temperature=0)
    again = complete(prompt=[ids, ids_of(served, PROMPTS[0]), ids], **fields)["choices"]
    for choice in (again[0], again[2]):
        values = choice["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(values[1:], alone["token_logprobs"][1:], rtol=0, atol=1e-5)
    unscored = complete(prompt=ids, max_tokens=2, temperature=0, echo=True)["choices"][0]
    assert unscored["logprobs"] is None


def test_penalties_bias_and_min_tokens_reach_the_device(served, complete, logits_of):
    """Greedy answers under every wish at once, each token checked against the definition."""
    ids = ids_of(served, "hello hello")
    params = SamplingParams(
        12,
        repetition_penalty=1.2,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        logit_bias=((104, 3.5), (9, -100.0)),
        min_tokens=6,
    )
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens")
    wishes = {name: getattr(params, name) for name in names} | {"logit_bias": {"104": 3.5, "9": -100}}
    stops = [30, 31]
    options = {"prompt": ids, "max_tokens": 12, "temperature": 0, "stop_token_ids": stops, "logprobs": 0}
    told = complete(**options, **wishes, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["tokens"]
    answer = [int(token.removeprefix("token_id:")) for token in told]
    ends = {*stops, *served.server.tokenizer.eos_ids}
    for place, token in enumerate(answer):
        x = logits_of(ids + answer[:place])[-1].astype(np.float64)
        for i, bias in params.logit_bias:
            x[i] += bias
        if place < params.min_tokens:
            x[list(ends)] = -np.inf
        seen = sorted({*ids, *answer[:place]})
        x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
        counts = np.bincount(answer[:place], minlength=len(x))
        x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        assert x[token] >= x.max() - 1e-4
    assert len(answer) == 12 or answer[-1] in ends
    assert len(answer) > params.min_tokens


def test_a_seed_decides_sampled_answers_whatever_the_company(complete):
    options = {"max_tokens": 12, "temperature": 1.7, "top_p": 0.95, "top_k": 60, "ignore_eos": True, "logprobs": 2}
    options |= {"frequency_penalty": 0.5}
    alone = complete(prompt="abc", seed=77, **options)["choices"][0]
    others = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True, "n": 3}
    crowd = complete(prompt=["abc", "xyz"], seed=77, **options | {"n": 3})["choices"]
    assert crowd[0]["text"] == alone["text"]
    assert len({c["text"] for c in crowd}) > 3
    complete(prompt="zzz", **others)
    repeat = complete(prompt=["abc", "xyz"], seed=77, **options | {"n": 3})["choices"]
    assert [c["text"] for c in repeat] == [c["text"] for c in crowd]
    assert complete(prompt="abc", seed=78, **options)["choices"][0]["text"] != alone["text"]


def test_every_wish_at_once_and_nothing_compiles(served, complete):
    """A batch in which each row asks for something else."""
    body = complete(
        prompt=["a", "b", "c", "d"],
        n=2,
        max_tokens=5,
        temperature=0.9,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.1,
        logit_bias={"70": -3},
        min_tokens=2,
        logprobs=20,
        echo=True,
        stop=["zz"],
        stop_token_ids=[5],
        return_tokens_as_token_ids=True,
    )
    assert [c["index"] for c in body["choices"]] == list(range(8))
    assert all(len(c["logprobs"]["top_logprobs"][1]) >= 20 for c in body["choices"])
    assert served.compiles == 0
