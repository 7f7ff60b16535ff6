"""Engines of their own: a cache too small for all, devices that fail, an Orbax folder.

The compile counter counts a whole process, so engines that come and go must not share a test with one that watches it.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.cli import DIGITS_FOLDER
from serving.config import EngineConfig
from serving.models import bind_decoder
from serving.protocol import ErrorEvent, FinishEvent, InvalidRequest, Overloaded
from tests.serving.demo_server import DIGITS, Server
from vitbatch import BucketLadder, EncoderConfig
from vitbatch.checkpoint import bind_tower
from vitstripe.checkpoint import Checkpoint, load, save_orbax

# One for all of them, so that its programs are compiled once.
SMALL = EngineConfig(tp=1, max_model_len=64, page_size=8, max_seqs=4, prefill_tokens=64, cache_tokens=96)


def test_preempted_requests_lose_nothing():
    """Four long answers in a cache that holds two: the same tokens as each gets alone."""
    server = Server(SMALL)
    server.engine.start()
    images = [server.prepare(path.read_bytes()) for path in DIGITS[:4]]
    sampled = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.5}
    alone = [server.ask(image, seed=n, **sampled).result(60)[0] for n, image in enumerate(images)]
    assert server.engine._scheduler.preemptions == 0
    futures = [server.ask(image, seed=n, **sampled) for n, image in enumerate(images)]
    assert [f.result(60)[0] for f in futures] == alone
    assert server.engine._scheduler.preemptions > 0
    assert server.close()
    assert server.idle()
    assert server.guard.after_ready == 0


def test_requests_that_fill_the_pool_each_are_answered_and_larger_ones_are_refused():
    """A pool of eight images: twenty requests of eight at once, and one of twenty, which would evict its own."""
    config = replace(SMALL, max_model_len=176, cache_tokens=704)
    server = Server(config, EncoderConfig(ladder=BucketLadder((256,)), pool_tokens=32))
    server.engine.start()
    draw = np.random.default_rng(1)
    images = [server.prepare(draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)) for _ in range(20)]
    assert {image.num_tokens for image in images} == {4}
    eights = [[images[(start + i) % 20] for i in range(8)] for start in range(20)]
    alone = [server.ask(*eights[i], ignore_eos=True).result(60)[0] for i in (0, 7)]
    with pytest.raises(InvalidRequest, match="the images have 80 tokens together, over the 32 the server holds"):
        server.ask(*images)
    results = [f.result(120) for f in [server.ask(*eight, ignore_eos=True) for eight in eights]]
    assert all(isinstance(event, FinishEvent) and event.reason == "length" for _, event in results)
    assert [results[0][0], results[7][0]] == alone
    assert server.close()
    assert server.idle()
    assert server.guard.after_ready == 0


def test_a_fault_of_the_devices_ends_the_engine_and_tells_everyone(monkeypatch):
    broken = Server(SMALL)
    broken.engine.start()
    image = broken.prepare(DIGITS[0].read_bytes())

    def lost(*args):
        raise jax.errors.JaxRuntimeError("device lost")

    monkeypatch.setattr(broken.runner, "decode", lost)
    futures = [broken.ask(image) for _ in range(3)]
    for future in futures:
        assert future.result(60)[1] == ErrorEvent("internal", "the engine stopped")
    assert broken.engine.health().state == "dead"
    with pytest.raises(Overloaded, match="dead"):
        broken.ask(image)
    broken.guard.close()


def test_an_orbax_folder_made_on_one_device_is_served_on_two(tmp_path, mesh_of):
    source, folder = Checkpoint(DIGITS_FOLDER), tmp_path / "digits"
    bindings = [bind_decoder(source, tp=1, dtype=jnp.bfloat16), bind_tower(source, dtype=jnp.bfloat16)]
    save_orbax(folder, source, {b.name: load(source, b, mesh_of(1)) for b in bindings})
    assert not list(folder.glob("*.safetensors"))
    server = Server(folder=folder)
    server.engine.start()
    answers = [server.ask(server.prepare(path.read_bytes())) for path in DIGITS[:6]]
    assert [a.result(60)[0] for a in answers] == [path.name.split("_")[1] for path in DIGITS[:6]]
    assert server.close()


def test_a_fault_of_the_devices_while_encoding_ends_the_engine(monkeypatch):
    deaths = []
    broken = Server(SMALL)
    monkeypatch.setattr(broken.engine, "_on_death", deaths.append)
    broken.engine.start()
    image = broken.prepare(DIGITS[0].read_bytes())

    def donated_and_lost(images):
        broken.runner.encoder.pool.delete()
        raise ValueError("lost after the pool was donated")

    monkeypatch.setattr(broken.runner.encoder, "encode_to_pool", donated_and_lost)
    assert broken.ask(image).result(60)[1] == ErrorEvent("internal", "the engine stopped")
    assert broken.engine.health().state == "dead"
    assert deaths == ["ValueError in the step loop"]
    broken.guard.close()


def test_stopping_tells_every_request_once():
    server = Server(SMALL)
    server.engine.start()
    images = [server.prepare(path.read_bytes()) for path in DIGITS[:5]]
    futures = [server.ask(image, max_tokens=20, ignore_eos=True) for image in images]
    assert not server.engine.drain(0.0), "five long answers take longer than nothing"
    with pytest.raises(Overloaded, match="draining"):
        server.ask(images[0])
    assert server.engine.stop("shut down") > 0
    assert ErrorEvent("internal", "the engine stopped") in [f.result(60)[1] for f in futures]
    server.guard.close()
