"""One server of each family that has a tower: HTTP requests with images, answered together as alone."""

import asyncio

import httpx
import numpy as np
import pytest

from serving.api import Limits, create_app
from serving.chat import ChatTemplate
from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from serving.tokenizer import Tokenizer
from tests.serving.api.harness import encoded_image, image_part
from vitbatch import BucketLadder, CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh

CONFIG = EngineConfig(tp=2, max_model_len=128, page_size=8, max_seqs=4, prefill_tokens=64)
MARKS = {"qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>")}
GLM_MARKS = ("<|begin_of_image|>", "<|end_of_image|>")
COLOURS = ((9, 99, 199), (250, 40, 10), (3, 250, 3))


def post(app, bodies):
    """The answers to chats that are sent at once."""

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))

    return asyncio.run(send())


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4v", "glm46v")), "glm_ocr"]
)
def test_images_sent_together_are_answered_as_alone_and_nothing_compiles(goldens, family):
    folder, guard, metrics = goldens / family, CompileGuard(), Metrics()
    tokenizer = Tokenizer.from_checkpoint(folder)
    engine = load_engine(
        Checkpoint(folder),
        make_mesh(CONFIG.tp),
        CONFIG,
        EncoderConfig(ladder=BucketLadder((256,)), pool_tokens=150),
        model_name=family,
        eos_ids=frozenset(),
        metrics=metrics,
        guard=guard,
    ).engine
    seen, submit = [], engine.submit
    engine.submit = lambda submission, on_event: (seen.append(submission), submit(submission, on_event))[1]
    engine.start()
    processor = engine._runner.encoder.processor
    template = ChatTemplate.from_checkpoint(folder)
    app = create_app(engine, tokenizer, template, processor, limits=Limits(), metrics=metrics)
    pictures = [encoded_image(90 + 20 * i, 70, colour=colour) for i, colour in enumerate(COLOURS)]
    bodies = [
        {
            "messages": [{"role": "user", "content": [image_part(picture), {"type": "text", "text": "?"}]}],
            "max_tokens": 5,
            "temperature": 0,
            "logprobs": True,
        }
        for picture in pictures
    ]
    try:
        alone = [post(app, [body])[0].json() for body in bodies]
        together = [answer.json() for answer in post(app, bodies)]
    finally:
        assert engine.drain(30.0)
        guard.close()
    assert guard.after_ready == 0, "something compiled after ready"
    begin, end = MARKS.get(family, GLM_MARKS)
    for submission in seen:
        [span] = submission.images
        ids = submission.prompt_ids
        assert ids.count(tokenizer.image_token_id) == span.image.num_tokens > 1
        assert [ids[span.start - 1], ids[span.stop]] == tokenizer.encode_prompt(begin + end)
    answers = [[token["token"] for token in body["choices"][0]["logprobs"]["content"]] for body in alone]
    assert all(len(answer) == 5 for answer in answers)
    assert [[t["token"] for t in body["choices"][0]["logprobs"]["content"]] for body in together] == answers
    chances = [
        np.array([[t["logprob"] for t in body["choices"][0]["logprobs"]["content"]] for body in bodies])
        for bodies in (alone, together)
    ]
    np.testing.assert_allclose(chances[0], chances[1], atol=1e-4)
    assert len({tuple(row) for row in chances[0].round(4).tolist()}) == len(COLOURS), "the images make no difference"
