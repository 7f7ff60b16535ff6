"""A GLM-5-Next server with both halves at work: images of many requests share vision calls over the lanes, and long
prompts go through the striped pooled indexer, in the same steps. Each answer is that of the request alone.

Batched products are not the same bits as single ones, so greedy answers may part where two tokens are as good as equal:
where they do, the solo run's best two logits must be within 1e-4.
"""

import json
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from serving.protocol import FinishEvent, ImageSpan, SamplingParams, Submission, TokenEvent
from tests.helpers import GOLDENS
from vitbatch import BucketLadder, CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh

FOLDER = GOLDENS / "glm5_next"
SPECIAL = json.loads((FOLDER / "config.json").read_text())
NEAR = 1e-4
SMALL = EngineConfig(
    tp=2, max_model_len=320, page_size=8, max_seqs=7, prefill_tokens=256, cache_tokens=512, stripe_rows=8
)


class Server:
    """text: fields of the decoder's configuration, replaced."""

    def __init__(self, config: EngineConfig, images: EncoderConfig, **text):
        self.metrics, self.guard = Metrics(), CompileGuard()
        checkpoint = Checkpoint(FOLDER)
        checkpoint.config["text_config"] |= text
        self.engine = load_engine(
            checkpoint,
            make_mesh(config.tp),
            config,
            images,
            model_name="both",
            eos_ids=frozenset(),
            metrics=self.metrics,
            guard=self.guard,
        ).engine
        self.runner, self.passes = self.engine._runner, []
        compute = self.runner.prefill

        def prefill(chunks, selection):
            self.passes.append((tuple(chunks), selection))
            return compute(chunks, selection)

        self.runner.prefill = prefill
        self.engine.start()

    def ask(self, name: str, ids: list[int], spans=(), tokens=5) -> Future:
        """A future of the answer's token events."""
        seen, done = [], Future()

        def on_event(event):
            if isinstance(event, TokenEvent):
                seen.append(event)
            else:
                assert isinstance(event, FinishEvent), event
                done.set_result(seen)

        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True, logprobs=2)
        self.engine.submit(Submission(name, ids, spans, params), on_event)
        return done

    def count(self, name: str, **labels) -> float:
        return self.metrics.registry.get_sample_value(f"vitstripe_{name}", labels) or 0.0

    def close(self):
        assert self.engine.drain(60.0)
        self.guard.close()
        self.engine.check_invariants()
        assert self.engine._scheduler.pages.used == 0
        assert self.guard.after_ready == 0, "something compiled after ready"


def image_prompt(server: Server, number: int):
    """(ids, spans) of a short question about an image that no other request has."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(2, 7, 2) * 28
    encoder = server.runner.encoder
    assert encoder is not None
    image = encoder.processor.prepare(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    before, after = rng.integers(0, 256, 3).tolist(), rng.integers(0, 256, 2 + number % 7).tolist()
    head = [*before, SPECIAL["image_start_token_id"]]
    body = [SPECIAL["image_token_id"]] * image.num_tokens
    return [*head, *body, SPECIAL["image_end_token_id"], *after], (ImageSpan(len(head), image),)


def text_prompt(number: int, length: int):
    return np.random.default_rng(1000 + number).integers(0, 256, length).tolist(), ()


def parted(alone, together) -> int:
    """Checks each answer against the request's own; returns how many parted at a tie."""
    near = 0
    for i, (own, other) in enumerate(zip(alone, together, strict=True)):
        apart = [j for j, (a, b) in enumerate(zip(own, other, strict=True)) if a.token_id != b.token_id]
        if apart:
            (_, best), (_, second) = own[apart[0]].logprobs.top
            assert best - second <= NEAR, f"request {i} differs from its solo run at token {apart[0]}"
            near += 1
    return near


def check_burst(server: Server, alone, requests, images: int, long: int):
    """All requests at once: same answers; vision calls, lanes, stripes and the passes that held both halves."""
    before = {n: server.count(n) for n in ("vit_calls_total", "vit_lanes_filled_sum")}
    striped = server.count("indexer_rows_total", path="striped")
    server.passes.clear()
    futures = [server.ask(f"b{i}", *request) for i, request in enumerate(requests)]
    near = parted(alone, [f.result(900) for f in futures])
    calls, lanes = (server.count(n) - before[n] for n in before)
    assert calls <= 0.6 * images, "images of several requests share a call"
    assert lanes >= 1.25 * calls, "a call fills several lanes"
    assert server.count("indexer_rows_total", path="striped") - striped >= long, "long prompts go the striped way"

    def both(chunks):
        with_images = {c.seq for c in chunks if c.seq.images}
        return len(with_images) > 1 and any(not c.seq.images for c in chunks)

    assert any(both(chunks) and how.stripe_rows for chunks, how in server.passes), "no pass held both halves"
    print(f"tp {server.runner.config.tp}: {calls:.0f} calls for {images} images, {near} parted at a tie")


@pytest.fixture(scope="module")
def small():
    """A server whose cache holds less than what comes at once."""
    server = Server(SMALL, EncoderConfig(ladder=BucketLadder((256,)), pool_tokens=150, batching="always"))
    yield server
    server.close()


def test_a_burst_of_images_and_long_prompts_answer_as_alone(small):
    requests = [text_prompt(i, 300 - 17 * i) for i in range(2)] + [image_prompt(small, i) for i in range(12)]
    alone = [small.ask(f"a{i}", *request).result(120) for i, request in enumerate(requests)]
    encoder = small.runner.encoder
    assert encoder is not None
    for key in {span.image.key for _, spans in requests for span in spans}:
        if key in encoder.cache:
            encoder.cache.discard(key)  # or it would not be encoded again
    check_burst(small, alone, requests, images=12, long=500)


def test_requests_that_were_preempted_answer_as_alone(small):
    """The state of whoever gives way is lost: it is computed again from the first token, on any seat."""
    lengths = (71, 33, 58, 117, 80, 44, 96, 65)
    requests = [text_prompt(10 + i, length) for i, length in enumerate(lengths)]
    alone = [small.ask(f"c{i}", *request, tokens=60).result(120) for i, request in enumerate(requests)]
    before = small.engine._scheduler.preemptions
    futures = [small.ask(f"d{i}", *request, tokens=60) for i, request in enumerate(requests)]
    print(parted(alone, [f.result(300) for f in futures]), "parted at a tie")
    assert small.engine._scheduler.preemptions > before


POOLS = 512
"""What the released model selects: 2048 tokens in pools of 4."""
LONG = EngineConfig(max_model_len=8192, max_seqs=72, prefill_tokens=512, max_queue=72, stripe_rows=16)
LONG_IMAGES = EncoderConfig(ladder=BucketLadder((256, 1024)), pool_tokens=2048, batching="always")


def long_requests(server: Server):
    return [text_prompt(i, 8000 + 40 * i) for i in range(4)] + [image_prompt(server, i) for i in range(64)]


@pytest.fixture(scope="module")
def alone_on_one_device():
    solo = Server(LONG, LONG_IMAGES, index_topk=4 * POOLS)
    answers = [solo.ask(f"a{i}", *request).result(600) for i, request in enumerate(long_requests(solo))]
    solo.close()
    return answers


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_64_images_beside_prompts_of_8k_tokens(alone_on_one_device, tp):
    server = Server(replace(LONG, tp=tp), LONG_IMAGES, index_topk=4 * POOLS)
    assert server.runner.lm.decoder.indexer.selected == POOLS
    # Rows that see no more pools than are selected take them all, and their passes need no stripes.
    check_burst(server, alone_on_one_device, long_requests(server), images=64, long=4 * (8000 - 4 * POOLS))

    def chooses(chunks):
        return any(c.seq.images for c in chunks) and any(c.stop > 4 * (POOLS + 1) for c in chunks)

    choosing = [how.stripe_rows for chunks, how in server.passes if chooses(chunks)]
    assert choosing, f"no pass held images beside rows that choose {POOLS} of more pools"
    assert all(choosing), "such a pass was not striped"
    print(f"{len(choosing)} of {len(server.passes)} passes held images beside rows that choose {POOLS} of their pools")
    server.close()
