"""The step loop on the embedded digit reader: right answers in any company, faults that stay where they arise."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest

from serving.pipeline import NOT_FINITE
from serving.protocol import ErrorEvent, FinishEvent, InvalidRequest, Overloaded
from serving.sampling import Sampled
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


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    assert server.settled(), "a request, a page or a pool row is left over"


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


def test_a_prompt_that_was_seen_is_found_and_the_same_images_are_not_encoded_again(server):
    image = server.prepare(np.random.default_rng(15).integers(0, 255, (96, 128, 3), dtype=np.uint8))
    ids, spans = server.prompt(image, text="what is it? " * 3)
    text, first = server.submit(ids, spans, ignore_eos=True).result(60)
    again, second = server.submit(ids, spans, ignore_eos=True).result(60)
    assert again == text
    assert first.usage.cached_tokens < spans[0].start, "nothing of a new image is known"
    assert second.usage.cached_tokens == (len(ids) - 1) // 8 * 8
    assert (len(first.vit_calls), second.vit_calls) == (1, ())
    assert second.usage.prompt_tokens == len(ids)


def test_another_image_behind_the_same_tokens_is_another_prefix(server, digits):
    by_size = {}
    for label, image in digits:
        by_size.setdefault(image.num_tokens, []).append((label, image))
    for same_size in by_size.values():
        for label, image in same_size * 2:
            text, event = server.ask(image).result(60)
            assert text == label
            assert event.usage.image_tokens == image.num_tokens
    prompts = {tuple(server.prompt(image)[0]) for _, image in by_size[4]}
    assert (len(by_size[4]) > 3, len(prompts)) == (True, 1), "only the pixels tell these prompts apart"


def test_requests_with_different_salts_share_nothing(server):
    ids, _ = server.prompt(text="a text that nobody else sends, of some length")
    cached = [server.submit(ids, salt=salt).result(60)[1].usage.cached_tokens for salt in ("a", "b", "a", "b")]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 0


def test_choices_of_one_prompt_compute_it_once(server, digits):
    ids, spans = server.prompt(digits[7][1], text="four answers, please, to this one question about this image")
    futures = [server.submit(ids, spans, temperature=1.0, seed=s, ignore_eos=True) for s in range(4)]
    cached = sorted(f.result(60)[1].usage.cached_tokens for f in futures)
    assert cached[1:] == [(len(ids) - 1) // 8 * 8] * 3
    assert cached[0] < cached[1]
    assert sum(len(f.result(60)[1].vit_calls) for f in futures) <= 1


def test_an_answer_is_part_of_the_prefix_of_the_next_turn(server):
    ids, _ = server.prompt(text="a first turn")
    seen = []
    server.submit(ids, on_token=seen.append, max_tokens=30, ignore_eos=True).result(60)
    turn = server.submit([*ids, *seen, 5, 6, 7]).result(60)[1]
    # The last token of the answer was sampled and never computed.
    assert turn.usage.cached_tokens == (len(ids) + 29) // 8 * 8


def test_the_metrics_count_prompt_tokens_looked_up_and_found(server):
    def counts():
        value = server.metrics.registry.get_sample_value
        return [value(f"vitstripe_prefix_cache_{name}_total") for name in ("queries", "hits")]

    ids, _ = server.prompt(text="how many of these tokens are found?")
    server.submit(ids).result(60)
    before = counts()
    cached = server.submit(ids).result(60)[1].usage.cached_tokens
    assert [a - b for a, b in zip(counts(), before, strict=True)] == [len(ids), cached]


def test_a_seed_decides_the_answer_whatever_the_batch(server, digits):
    ids, spans = server.prompt(digits[3][1])
    sampled = {"temperature": 2.0, "top_p": 0.95, "ignore_eos": True, "max_tokens": 12}
    alone = server.submit(ids, spans, seed=11, **sampled).result(60)[0]
    futures = [server.submit(ids, spans, seed=s, **sampled) for s in (7, 11, 13)]
    answers = [f.result(60)[0] for f in futures]
    assert answers[1] == alone
    assert len(set(answers)) > 1, "other seeds draw other tokens"


def test_a_step_is_on_its_way_before_the_one_before_it_is_read(server, monkeypatch):
    order, passes = [], []

    def dispatch(run):
        def watched(*args):
            order.append(f"dispatch {len(passes)}")
            passes.append(run(*args))
            return passes[-1]

        return watched

    def read(sampled, **how):
        order.append(f"read {[p is sampled for p in passes].index(True)}")
        return on_host(sampled, **how)

    on_host = Sampled.on_host
    monkeypatch.setattr(Sampled, "on_host", read)
    for kind in ("prefill", "decode"):
        monkeypatch.setattr(server.runner, kind, dispatch(getattr(server.runner, kind)))
    server.submit(server.prompt(text="a new one")[0], max_tokens=4, ignore_eos=True).result(60)
    # A prefill pass and three decode passes; nothing is dispatched past the last token.
    expected = ["dispatch 0", "dispatch 1", "read 0", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3"]
    assert order == expected


def test_a_decode_step_is_told_when_the_next_one_is_on_its_way(server, monkeypatch):
    """Receivers want the interpreter for as long as a step takes, so they are woken when the devices are busy."""
    happened, decode = [], server.runner.decode
    monkeypatch.setattr(server.runner, "decode", lambda seqs: (happened.append("step"), decode(seqs))[1])
    ids, spans = server.prompt()
    server.submit(ids, spans, on_token=lambda token: happened.append("token"), max_tokens=8, ignore_eos=True).result(60)
    assert happened.count("token") == 8
    # Steps that were dispatched when each token was told; the first token is the prefill pass's, and the last steps'
    # have nothing behind them.
    before = [happened[:i].count("step") for i, what in enumerate(happened) if what == "token"]
    assert before[1:6] == [3, 4, 5, 6, 7], happened


def test_work_between_steps_finds_nothing_on_the_devices_and_loses_nothing(server, digits, monkeypatch):
    engine, in_flight, held = server.engine, threading.Event(), threading.Event()
    alone = [server.ask(image, ignore_eos=True).result(60)[0] for _, image in digits[:3]]
    step = engine._pipeline.step

    def pausing():
        step()
        if engine._pipeline._flight is not None and not held.is_set():
            in_flight.set()
            held.wait(60)

    def look():
        assert engine._pipeline._flight is None
        return threading.current_thread().name, engine._runner.latest.is_ready()

    monkeypatch.setattr(engine._pipeline, "step", pausing)
    futures = [server.ask(image, ignore_eos=True) for _, image in digits[:3]]
    assert in_flight.wait(60)
    with ThreadPoolExecutor(1) as caller:
        seen = caller.submit(engine.between_steps, look)
        while not engine._chores:
            time.sleep(0.001)
        held.set()
        assert seen.result(60) == ("engine", True)
    assert [f.result(60)[0] for f in futures] == alone


def test_an_idle_engine_does_other_work_too_and_outlives_its_fault(server, digits):
    engine = server.engine
    assert engine.between_steps(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        engine.between_steps(lambda: 1 // 0)
    assert server.ask(digits[0][1]).result(60)[0] == digits[0][0]


def test_work_that_the_engine_does_not_come_to_is_given_up(server, digits, monkeypatch):
    engine, entered, held, done = server.engine, threading.Event(), threading.Event(), []
    step = engine._pipeline.step
    monkeypatch.setattr(engine._pipeline, "step", lambda: (entered.set(), held.wait(60), step()))
    answer = server.ask(digits[0][1])
    assert entered.wait(60)
    with pytest.raises(TimeoutError):
        engine.between_steps(lambda: done.append(1), timeout=0.1)
    held.set()
    assert answer.result(60)[0] == digits[0][0]
    assert done == [], "it is not done later"


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


def test_a_token_that_is_not_finite_ends_its_request_alone_and_its_pages_are_not_found(server, digits, monkeypatch):
    text = "this prompt is long enough to fill a few pages of the cache"
    decode = server.runner.decode

    def poisoned(seqs):
        sampled = decode(seqs)
        tokens = np.array(sampled.tokens)
        for row, seq in enumerate(seqs):
            if seq.request_id == bad.request_id and seq.generated > 3:
                tokens[row] = -1
        return replace(sampled, tokens=tokens)

    bad = server.ask(digits[0][1], text=text, max_tokens=40, ignore_eos=True, temperature=1.0)
    monkeypatch.setattr(server.runner, "decode", poisoned)
    good = server.ask(digits[1][1], max_tokens=12, ignore_eos=True)
    assert bad.result(60)[1].message == NOT_FINITE
    assert good.result(60)[1].usage.completion_tokens == 12
    monkeypatch.setattr(server.runner, "decode", decode)
    assert server.ask(digits[0][1], text=text).result(60)[1].usage.cached_tokens == 0


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
    ids, spans = server.prompt(digits[0][1])
    with pytest.raises(InvalidRequest, match="image 0 takes tokens"):
        server.submit(ids[: spans[0].stop - 1], spans)
    with pytest.raises(InvalidRequest, match="image 1 takes tokens"):
        server.submit(ids, spans * 2)


def test_a_full_queue_refuses_and_recovers(server, digits):
    ids, spans = server.prompt(digits[0][1])
    held = CONFIG.max_queue + CONFIG.max_seqs
    futures = [server.submit(ids, spans, max_tokens=100, ignore_eos=True) for _ in range(held)]
    with pytest.raises(Overloaded) as refusal:
        server.submit(ids, spans)
    assert refusal.value.retry_after > 0
    assert refusal.value.reason == "queue_full"
    for future in futures:
        server.engine.abort(future.request_id)
    assert all(f.result(60)[1].reason in ("abort", "length") for f in futures)
    assert server.ask(digits[0][1]).result(60)[0] == digits[0][0]
