"""Clients that leave, at every stage of a request: the seat, the pages and the pool rows are free within two steps."""

import asyncio
import threading

import numpy as np
import pytest

from serving.api import Limits, create_app
from serving.chat import ChatTemplate
from serving.cli import DIGITS_FOLDER
from tests.serving.api.harness import Connection, encoded_image, eventually, image_part
from tests.serving.demo_server import Server
from vitbatch import PoolFull

ROUTE = "/v1/chat/completions"
PICTURE = encoded_image(256, 128)


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    assert made.guard.after_ready == 0, "something compiled after ready"
    made.guard.close()


class Gate:
    """Stops the engine's thread where a test wants it."""

    def __init__(self):
        self.reached, self._open = threading.Event(), threading.Event()

    def hold(self):
        self.reached.set()
        assert self._open.wait(30), "the test never opened the gate"

    def open(self):
        self._open.set()


def before(monkeypatch, owner, name, applies, gate):
    """Holds the first call of owner.name for which `applies`."""
    original = getattr(owner, name)

    def held(*args):
        if not gate.reached.is_set() and applies(*args):
            gate.hold()
        return original(*args)

    monkeypatch.setattr(owner, name, held)


def stage_queued(server, monkeypatch, gate):
    """Every seat is taken."""
    fillers = [server.ask(max_tokens=120, ignore_eos=True) for _ in range(8)]
    return fillers, lambda: len(server.engine._scheduler.waiting) > 0


def stage_image_waiting(server, monkeypatch, gate):
    """Its image finds no room in the row pool."""
    refused = threading.Event()

    def full(images):
        refused.set()
        raise PoolFull("made to be full")

    monkeypatch.setattr(server.runner.encoder, "encode_to_pool", full)
    return [], refused.is_set


def stage_encoding(server, monkeypatch, gate):
    before(monkeypatch, server.runner.encoder, "encode_to_pool", lambda images: True, gate)
    return [], gate.reached.is_set


def stage_first_chunk(server, monkeypatch, gate):
    before(monkeypatch, server.runner, "prefill", lambda chunks, how: chunks[0].start == 0, gate)
    return [], gate.reached.is_set


def stage_later_chunk(server, monkeypatch, gate):
    def later(chunks, how):
        return any(c.start and not c.finishes_prompt for c in chunks)

    before(monkeypatch, server.runner, "prefill", later, gate)
    return [], gate.reached.is_set


def stage_decode(server, monkeypatch, gate):
    before(monkeypatch, server.runner, "decode", lambda seqs: True, gate)
    return [], gate.reached.is_set


def stage_just_finished(server, monkeypatch, gate):
    """Its last token is known to the engine, and nobody has been told."""
    before(monkeypatch, server.engine, "_finish", lambda seq, reason: reason == "length", gate)
    return [], gate.reached.is_set


STAGES = {
    f.__name__.removeprefix("stage_"): f
    for f in (
        stage_queued,
        stage_image_waiting,
        stage_encoding,
        stage_first_chunk,
        stage_later_chunk,
        stage_decode,
        stage_just_finished,
    )
}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_client_that_leaves_frees_everything_within_two_steps(server, monkeypatch, stage, stream, n):
    template = ChatTemplate.from_checkpoint(DIGITS_FOLDER)
    gate, left, freed = Gate(), [], []
    content = [image_part(PICTURE), {"type": "text", "text": "digit?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "stream": stream,
        "n": n,
        "max_tokens": 100 if stage is not stage_just_finished else 3,
        "ignore_eos": True,
    }

    async def run(engine):
        fillers, reached = stage(server, monkeypatch, gate)
        ours = {f.request_id for f in fillers}
        app = create_app(engine, server.tokenizer, template, server.runner.encoder.processor, Limits(), server.metrics)
        abort, report = engine.abort, engine._report

        def aborted(request_id):
            abort(request_id)
            left.append(engine.steps)

        def reported():
            report()
            held = [s.request_id for s in (*engine._scheduler.running, *engine._scheduler.waiting)]
            if len(left) == n and not freed and not set(held) - ours:
                freed.append(engine.steps)

        monkeypatch.setattr(engine, "abort", aborted)
        monkeypatch.setattr(engine, "_report", reported)
        connection = Connection(app, ROUTE, body)
        await eventually(lambda: reached() and len(engine._known) == n + len(ours), 20)
        assert not connection.served.done()
        connection.leave()
        async with asyncio.timeout(10):
            await connection.served
        await eventually(lambda: len(left) == n)
        gate.open()
        await eventually(lambda: freed or not engine._known, 20)
        for filler in fillers:
            abort(filler.request_id)
        await eventually(lambda: not engine._known, 20)
        await eventually(server.idle)

    # Chunks of 16 tokens: the prompt takes several passes. No prefix cache: every case computes its whole prompt.
    with server.another_engine(prefill_tokens=16, prefix_cache=False) as engine:
        try:
            asyncio.run(run(engine))
        finally:
            gate.open()
    assert freed, "the engine forgot the request without freeing it"
    assert freed[0] - left[-1] <= 2, f"left in step {left[-1]}, freed in step {freed[0]}"


def test_the_engine_serves_on_after_all_that(server):
    image = server.prepare(np.full((64, 64, 3), 90, np.uint8))
    with server.another_engine():
        assert server.ask(image).result(60)[1].reason in ("stop", "length")
