"""Faults that users of other engines reported, shrunk to the smallest request that provokes them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.protocol import ErrorEvent, FinishEvent
from tests.serving.demo_server import DIGITS, Server


@pytest.fixture(scope="module")
def server():
    made = Server()
    made.engine.start()
    yield made
    assert made.close(), "the engine did not drain"
    assert made.idle(), "a page or a pool row leaked"
    assert made.guard.after_ready == 0, "something compiled after ready"


def picture(server, seed, height, width):
    return server.prepare(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    assert server.settled(), "a request, a page or a pool row is left over"


@pytest.mark.parametrize(
    ("height", "width"), [(96, 160), (128, 128), (32, 544), (128, 256)], ids=["one less", "equal", "one more", "twice"]
)
def test_an_image_about_as_long_as_a_chunk_reads_as_in_one_piece(server, height, width):
    """Images of 15, 16, 17 and 32 tokens in chunks of 16."""
    image = picture(server, height + width, height, width)
    assert image.num_tokens in (15, 16, 17, 32)
    whole = server.ask(image, ignore_eos=True, max_tokens=12).result(60)[0]
    with server.another_engine(prefill_tokens=16):
        assert server.ask(image, ignore_eos=True, max_tokens=12).result(60)[0] == whole


def test_a_small_row_pool_with_much_reuse_never_mixes_images_up(server):
    """Sixteen requests at a time over twice as many images as the pool holds."""
    images = [picture(server, seed, 160, 224) for seed in range(10)]
    assert sum(i.num_tokens for i in images) > 1.9 * server.runner.encoder.pool.shape[0]
    alone = [server.ask(image, ignore_eos=True).result(60)[0] for image in images]
    assert len(set(alone)) > 1
    picks = np.random.default_rng(3).integers(0, len(images), 48)
    futures = [(i, server.ask(images[i], ignore_eos=True, text=f"digit? {n}")) for n, i in enumerate(picks[:16])]
    assert all(isinstance(f.result(60)[1], FinishEvent) for _, f in futures)
    for start in range(0, 48, 16):
        futures = [(i, server.ask(images[i], ignore_eos=True)) for i in picks[start : start + 16]]
        assert [f.result(60)[0] for _, f in futures] == [alone[i] for i, _ in futures]


def test_two_streams_of_requests_are_each_answered_about_their_own_image(server):
    def loop(path):
        image = server.prepare(path.read_bytes())
        return {server.ask(image, text=f"digit? {n % 7}").result(60)[0] for n in range(100)}

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(loop, (DIGITS[2], DIGITS[9]))) == [{DIGITS[2].name[6]}, {DIGITS[9].name[6]}]


def test_many_requests_of_many_images_each_do_not_evict_their_own(server):
    """Six at once, each of eight images that take most of the pool together."""
    requests = [[picture(server, 100 * r + i, 96, 160) for i in range(8)] for r in range(6)]
    futures = [server.ask(*images, ignore_eos=True, max_tokens=3) for images in requests]
    assert all(isinstance(f.result(120)[1], FinishEvent) for f in futures)


def test_a_second_turn_with_one_more_image_encodes_only_that_one(server):
    first, second = picture(server, 51, 96, 96), picture(server, 52, 96, 128)
    server.ask(first).result(60)
    misses = server.runner.encoder.cache.misses
    usage = server.ask(first, second).result(60)[1].usage
    assert server.runner.encoder.cache.misses == misses + 1
    assert usage.cached_tokens >= first.num_tokens // 8 * 8


def test_text_first_and_images_later_run_the_same_programs(server):
    before = server.guard.after_ready
    server.submit(*server.prompt()).result(60)
    assert server.ask(server.prepare(DIGITS[5].read_bytes())).result(60)[0] == DIGITS[5].name[6]
    assert server.guard.after_ready == before == 0


@pytest.mark.filterwarnings("ignore:Exception in thread engine")
def test_a_dead_engine_thread_is_not_called_healthy(server, monkeypatch):
    with server.another_engine() as engine:
        gone = threading.Event()

        def killed():
            gone.set()
            raise SystemExit

        monkeypatch.setattr(engine._pipeline, "step", killed)
        request = server.ask(server.prepare(DIGITS[0].read_bytes()))
        assert gone.wait(30)
        engine._thread.join(30)
        assert engine.health().state == "dead"
        assert engine.pulse() == "gone"
        assert engine.stop("its thread is gone") == 1
        assert request.result(5)[1] == ErrorEvent("internal", "the engine stopped")
        engine._scheduler.waiting.clear()
