"""Sixty-four requests at once, each about its own image: each gets its own answer, whatever it rode with.

Batched products are not the same bits as single ones, so greedy texts may part where two tokens are as good as equal:
where they do, the solo run's best two logits must be within 1e-4. Such places are counted and printed.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from serving.config import EngineConfig
from serving.protocol import SamplingParams, Submission, TokenEvent
from tests.serving.demo_server import DIGITS, Server

REQUESTS, TOKENS, NEAR = 64, 6, 1e-4
CONFIG = EngineConfig(max_model_len=128, page_size=8, max_seqs=REQUESTS, prefill_tokens=4096, max_queue=REQUESTS)


@pytest.fixture(scope="module")
def images():
    """(digit, pixels): every digit of the demo in several shades, so that no two images are equal."""
    made = []
    for i in range(REQUESTS):
        path = DIGITS[i % len(DIGITS)]
        shade = 1.0 - 0.04 * (i // len(DIGITS))
        pixels = np.asarray(Image.open(path).convert("RGB"), np.float32) * shade
        made.append((path.name.split("_")[1], pixels.astype(np.uint8)))
    return made


@contextmanager
def started(tp) -> Iterator[Server]:
    server = Server(replace(CONFIG, tp=tp))
    try:
        yield server
    finally:
        server.guard.close()


def ask(server, name, image) -> Future:
    """A future of the answer's token events."""
    ids, spans = server.prompt(image)
    events, done = [], Future()

    def on_event(event):
        if isinstance(event, TokenEvent):
            events.append(event)
        else:
            done.set_result(events)

    params = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    server.engine.submit(Submission(name, ids, spans, params), on_event)
    return done


def run(server, images, *, together, **changes):
    """The events of every request, all at once or one after another. Nothing compiles meanwhile (another server that
    starts beside an open one counts for both)."""
    compiled = server.guard.after_ready
    with server.another_engine(**changes):
        prepared = [server.prepare(pixels) for _, pixels in images]
        if together:
            futures = [ask(server, f"r{i}", image) for i, image in enumerate(prepared)]
            events = [f.result(300) for f in futures]
        else:
            events = [ask(server, f"r{i}", image).result(120) for i, image in enumerate(prepared)]
    assert server.guard.after_ready == compiled, "something compiled after ready"
    return events


@pytest.fixture(scope="module")
def solo(images):
    """Each request alone: no other request, no cache, one chunk, one device."""
    with started(1) as server:
        events = run(server, images, together=False, prefix_cache=False)
        first = server.tokenizer.token_bytes
        answers = [first(e[0].token_id).decode() for e in events]
        assert len(set(answers)) >= 8
        right = sum(a == digit for a, (digit, _) in zip(answers, images, strict=True))
        assert right > 0.9 * REQUESTS
        yield server, events


def margin(event):
    """How far the solo run's second-best logit is behind its best."""
    (_, best), (_, second) = event.logprobs.top
    return best - second


def compare(solo, together):
    """Checks every request against its solo run; returns how many parted where two tokens were as good as equal."""
    near = 0
    alone = np.array([[e.logprobs.logprob for e in events] for events in solo])
    for i, (own, events) in enumerate(zip(solo, together, strict=True)):
        apart = [j for j, (a, b) in enumerate(zip(own, events, strict=True)) if a.token_id != b.token_id]
        if apart:
            assert margin(own[apart[0]]) <= NEAR, f"request {i} differs from its solo run at token {apart[0]}"
            near += 1
        same = slice(0, apart[0] if apart else TOKENS)
        told = np.array([e.logprobs.logprob for e in events])[same]
        distance = np.abs(alone[:, same] - told).sum(1)
        assert same.stop == 0 or int(distance.argmin()) == i, f"request {i} is nearest to request {distance.argmin()}"
    return near


def check(solo, server, images, chunks):
    for chunk in chunks:
        for cache in (True, False):
            together = run(server, images, together=True, prefill_tokens=chunk, prefix_cache=cache)
            near = compare(solo, together)
            print(f"tp {server.runner.config.tp}, chunks of {chunk}, cache {cache}: {near} of {REQUESTS} part at a tie")


def test_each_of_64_requests_gets_its_own_answer_on_one_device(solo, images):
    server, events = solo
    check(events, server, images, (16, 4096))


@pytest.mark.slow
@pytest.mark.multidevice
def test_each_of_64_requests_gets_its_own_answer_on_two_devices(solo, images):
    with started(2) as server:
        check(solo[1], server, images, (64,))


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_of_64_requests_gets_its_own_answer_on_any_mesh_in_any_chunks(solo, images, tp):
    with started(tp) as server:
        check(solo[1], server, images, (16, 64, 256, 1024, 4096))
