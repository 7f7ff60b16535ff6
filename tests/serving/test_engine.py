"""The step loop on the embedded digit reader: right answers in any company, faults that stay where they arise."""

import threading

import jax
import numpy as np
import pytest

from serving.protocol import ErrorEvent, FinishEvent, InvalidRequest, Overloaded
from tests.serving.demo_server import CONFIG, DIGITS, PHOTOS, Server


@pytest.fixture(scope="module")
def server():
    made = Server()
    made.engine.start()
    yield made
    assert made.close(), "the engine did not drain"
    assert made.idle(), "a page or a pool row leaked"
    assert made.guard.after_ready == 0, "something compiled after ready"
    assert made.engine.health().state == "draining"


@pytest.fixture(scope="module")
def digits(server):
    return [(path.name.split("_")[1], server.prepare(path.read_bytes())) for path in DIGITS]


def test_a_burst_of_digits_is_answered_right_and_shares_encoder_calls(server, digits):
    answers = [(label, server.ask(image)) for label, image in digits]
    results = [(label, *future.result(60)) for label, future in answers]
    assert [(label, text) for label, text, _ in results if label != text] == []
    assert all(event.reason == "stop" for *_, event in results)
    calls = [event.vit_calls for *_, event in results]
    assert all(len(c) == 1 for c in calls)
    assert len(set(calls)) < len(calls) / 2, "most images rode with another request's"


def test_chunk_edges_inside_images_do_not_change_the_answer(server):
    photos = [server.prepare(path.read_bytes()) for path in PHOTOS]
    assert min(p.num_tokens for p in photos) * 2 > CONFIG.prefill_tokens - 64, "the second photo of a pass is cut"
    alone = [server.ask(p, ignore_eos=True).result(60)[0] for p in photos]
    together = [server.ask(p, ignore_eos=True) for p in photos]
    assert [f.result(60)[0] for f in together] == alone


def test_two_images_of_one_request_are_told_apart(server, digits):
    (_, one), (_, other) = digits[0], digits[-1]
    first = server.ask(one, other, ignore_eos=True).result(60)[0]
    second = server.ask(other, one, ignore_eos=True).result(60)[0]
    assert first != second, "the order of a request's images must matter"
    assert server.ask(one, other, ignore_eos=True).result(60)[0] == first


def test_equal_images_in_one_burst_are_encoded_once(server):
    image = server.prepare(np.random.default_rng(5).integers(0, 255, (96, 160, 3), dtype=np.uint8))
    before = server.runner.encoder.cache.misses
    answers = [f.result(60) for f in [server.ask(image) for _ in range(4)]]
    assert server.runner.encoder.cache.misses == before + 1
    assert len({text for text, _ in answers}) == 1


def test_a_seed_decides_the_answer_whatever_the_batch(server, digits):
    ids, spans = server.prompt(digits[3][1])
    sampled = {"temperature": 2.0, "top_p": 0.95, "ignore_eos": True, "max_tokens": 12}
    alone = server.submit(ids, spans, seed=11, **sampled).result(60)[0]
    futures = [server.submit(ids, spans, seed=s, **sampled) for s in (7, 11, 13)]
    answers = [f.result(60)[0] for f in futures]
    assert answers[1] == alone
    assert len(set(answers)) > 1, "other seeds draw other tokens"


def test_abort_frees_the_request_and_leaves_the_others(server, digits):
    seen = threading.Event()
    long = server.ask(digits[0][1], max_tokens=120, ignore_eos=True, temperature=1.0)
    other = server.ask(digits[1][1], on_token=lambda token: seen.set(), max_tokens=20, ignore_eos=True)
    assert seen.wait(60)
    server.engine.abort(long.request_id)
    _, event = long.result(60)
    assert isinstance(event, FinishEvent)
    assert event.reason == "abort"
    assert event.usage.completion_tokens < 120
    assert other.result(60)[1].usage.completion_tokens == 20


def test_a_receiver_that_raises_ends_its_own_request_only(server, digits):
    def broken(token):
        raise OSError("the client went away")

    bad = server.ask(digits[0][1], on_token=broken)
    good = server.ask(digits[1][1])
    assert good.result(60)[0] == digits[1][0]
    assert bad.result(60)[1].reason == "abort"


def test_an_image_that_fails_to_encode_fails_its_request_only(server, digits, monkeypatch):
    encoder = server.runner.encoder
    poison = server.prepare(np.random.default_rng(6).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    encode = encoder.encode_to_pool

    def failing(images):
        if any(image.key == poison.key for image in images):
            raise ValueError("made to fail")
        return encode(images)

    monkeypatch.setattr(encoder, "encode_to_pool", failing)
    futures = [server.ask(digits[2][1]), server.ask(poison), server.ask(digits[4][1])]
    results = [f.result(60) for f in futures]
    assert [results[0][0], results[2][0]] == [digits[2][0], digits[4][0]]
    assert isinstance(results[1][1], ErrorEvent)
    assert results[1][1].kind == "internal"
    assert "made to fail" not in results[1][1].message


def test_an_image_of_nan_rows_fails_its_request_and_poisons_no_later_one(server, digits, monkeypatch):
    encoder, runner = server.runner.encoder, server.runner
    image = server.prepare(np.random.default_rng(7).integers(0, 255, (96, 96, 3), dtype=np.uint8))
    splice = runner._splice

    def poisoned(ids, pool_index):
        hidden, deep = splice(ids, pool_index)
        return jax.device_put(np.full(hidden.shape, np.nan, np.float32), hidden.sharding), deep

    monkeypatch.setattr(runner, "_splice", poisoned)
    text, event = server.ask(image).result(60)
    assert (text, event.kind) == ("", "internal")
    assert "not finite" in event.message
    monkeypatch.setattr(runner, "_splice", splice)
    # The pages that held NaN are handed out again: every one of them within a few requests.
    for _ in range(3):
        futures = [(label, server.ask(image)) for label, image in digits]
        assert [label for label, f in futures if f.result(60)[0] != label] == []
    assert encoder.cache.tokens_pinned == 0


def test_requests_that_hold_parts_of_the_row_pool_do_not_wait_for_each_other_forever(server):
    """Two requests whose images together are larger than the pool, taken in by turns, and one that needs none."""
    rng = np.random.default_rng(9)

    def image(side):
        return server.prepare(rng.integers(0, 255, (side, 256, 3), dtype=np.uint8))

    first = server.submit(*server.prompt(image(160), image(224)))
    second = server.submit(*server.prompt(image(224), image(160)))
    text = server.submit(*server.prompt())
    third = server.submit(*server.prompt(image(256), image(160)))
    for future in (first, second, text, third):
        assert isinstance(future.result(60)[1], FinishEvent)


def test_more_images_than_the_row_pool_holds_wait_their_turn(server):
    rng = np.random.default_rng(8)
    images = [server.prepare(rng.integers(0, 255, (224, 224, 3), dtype=np.uint8)) for _ in range(8)]
    assert sum(i.num_tokens for i in images) > 2 * server.runner.encoder.pool.shape[0]
    results = [f.result(60) for f in [server.ask(image) for image in images]]
    assert all(isinstance(event, FinishEvent) for _, event in results)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(server, digits):
    image = server.prepare(np.full((256, 256, 3), 90, np.uint8))
    ids, spans = server.prompt(*[image] * 3)
    with pytest.raises(InvalidRequest, match=r"\d+ tokens.*176"):
        server.submit(ids, spans)
    with pytest.raises(InvalidRequest, match="no tokens"):
        server.submit([])
    with pytest.raises(InvalidRequest, match=r"outside 0 \.\. 271"):
        server.submit([5, 272])


def test_a_full_queue_refuses_and_recovers(server, digits):
    ids, spans = server.prompt(digits[0][1])
    held = CONFIG.max_queue + CONFIG.max_seqs
    futures = [server.submit(ids, spans, max_tokens=100, ignore_eos=True) for _ in range(held)]
    with pytest.raises(Overloaded) as refusal:
        server.submit(ids, spans)
    assert refusal.value.retry_after > 0
    for future in futures:
        server.engine.abort(future.request_id)
    assert all(f.result(60)[1].reason in ("abort", "length") for f in futures)
    assert server.ask(digits[0][1]).result(60)[0] == digits[0][0]
