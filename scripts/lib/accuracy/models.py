"""Three ways to the same answers: the engine in this process, its decoder called without it, a server over HTTP."""

import base64
import hashlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.lib.accuracy.questions import Question
from serving.api.prompts import Prompt, expand_images
from serving.batch import Packer, samples_of
from serving.chat import ChatTemplate
from serving.config import EngineConfig, bucket_for
from serving.engine import Engine
from serving.lm import LanguageModel, LmShapes
from serving.load import has_images, load_engine
from serving.metrics import Metrics
from serving.models import bind_decoder, family_of
from serving.models.decoder import Selection
from serving.positions import mrope_positions
from serving.protocol import ErrorEvent, Event, SamplingParams, Submission, TokenEvent
from serving.scheduler import Chunk
from serving.sequence import Sequence as Request
from serving.tokenizer import Tokenizer
from vitbatch import CompileGuard, EncoderConfig, PreparedImage, VisionEncoder
from vitstripe.checkpoint import Checkpoint, load
from vitstripe.mesh import make_mesh
from vitstripe.platform import platform_of_mesh

MAX_TOKENS = 16
IMAGES = EncoderConfig(pool_tokens=4096)


class Texts:
    """A checkpoint's tokenizer and template."""

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.from_checkpoint(folder)
        self._template = ChatTemplate.from_checkpoint(folder)

    def prompt(self, question: Question, prepare: Callable[[bytes], Any] | None) -> Prompt:
        if question.ids:
            return Prompt(list(question.ids), ())
        assert prepare is not None, "a question with images to a model without a tower"
        parts = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
        ids = self.tokenizer.encode_rendered(self._template.render([{"role": "user", "content": parts}]))
        return expand_images(ids, [prepare(file) for file in question.images], self.tokenizer.image_token_id)

    def answer(self, ids: Sequence[int]) -> str:
        ids = [t for t in ids if t not in self.tokenizer.eos_ids]
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode(errors="replace").strip()


class Served:
    """An engine in this process."""

    def __init__(self, engine: Engine, texts: Texts, metrics: Metrics):
        self.engine, self.texts, self._metrics = engine, texts, metrics
        self.encoder: VisionEncoder | None = engine._runner.encoder
        self._asked = self._salt = 0

    def metric(self, name: str, **labels: str) -> float:
        return self._metrics.registry.get_sample_value(f"vitstripe_{name}", labels) or 0.0

    def set_batching(self, batching: str) -> None:
        """Images of several requests in one call, "always" or "never"."""
        assert self.encoder is not None
        self.encoder.config = replace(self.encoder.config, batching=batching)

    def set_striping(self, on: bool) -> None:
        """Lets the indexer's rows be striped where its programs exist, or every device select for all rows."""
        runner = self.engine._runner
        runner.stripes = replace(runner.stripes, min_mean_keys=0 if on else 1 << 30)

    def _prepare(self, file: bytes) -> PreparedImage:
        """A key of its own each time, so that nothing is answered from what was encoded in another way before."""
        assert self.encoder is not None
        image = self.encoder.processor.prepare(file)
        return replace(image, key=hashlib.sha256(self._salt.to_bytes(4, "big") + image.key).digest())

    def answers(self, questions: Sequence[Question], together: int = 64, *, again: bool = False) -> list[str]:
        """Greedy answers; `together` requests are under way at one time. again: of questions that were asked just now,
        whose images and prompts caches may know. Raises RuntimeError when one fails."""
        self._salt += not again
        prompts = [self.texts.prompt(question, self._prepare) for question in questions]
        found: list[list[int]] = [[] for _ in questions]
        room, left, failed = threading.Semaphore(together), threading.Semaphore(0), []

        def receiver(i: int) -> Callable[[Event], None]:
            def on_event(event: Event) -> None:
                if isinstance(event, TokenEvent):
                    found[i].append(event.token_id)
                    return
                if isinstance(event, ErrorEvent):
                    failed.append(f"question {i}: {event.message}")
                room.release()
                left.release()

            return on_event

        for i, prompt in enumerate(prompts):
            room.acquire()
            self._asked += 1
            params = SamplingParams(MAX_TOKENS, temperature=0.0)
            self.engine.submit(Submission(f"q{self._asked}", prompt.ids, prompt.images, params), receiver(i))
        for _ in prompts:
            left.acquire()
        if failed:
            raise RuntimeError("; ".join(failed[:3]))
        return [self.texts.answer(ids) for ids in found]


@contextmanager
def served(folder: Path, config: EngineConfig, images: EncoderConfig = IMAGES) -> Iterator[Served]:
    """A warmed engine of its own, until the block is left. Raises RuntimeError when anything compiled after ready."""
    texts, metrics, guard = Texts(folder), Metrics(), CompileGuard()
    engine = load_engine(
        Checkpoint(folder),
        make_mesh(config.tp),
        config,
        images,
        model_name=folder.name,
        eos_ids=texts.tokenizer.eos_ids,
        metrics=metrics,
        guard=guard,
    ).engine
    engine.start()
    try:
        yield Served(engine, texts, metrics)
    finally:
        engine.drain(60.0)
        guard.close()
    if guard.after_ready:
        raise RuntimeError(f"{guard.after_ready} programs were compiled after ready")


class Direct:
    """The decoder's programs run by hand on one device, one question at a time: without scheduler, shared passes,
    prefix cache, image pool and sampling. longest: tokens of a prompt and its answer."""

    def __init__(self, folder: Path, longest: int, rows: int = 256):
        checkpoint, mesh = Checkpoint(folder), make_mesh(1)
        self.texts = Texts(folder)
        self._config = EngineConfig(max_model_len=longest, max_seqs=1, prefill_tokens=rows)
        self._encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=mesh) if has_images(checkpoint) else None
        self._mrope = family_of(checkpoint.config).uses_mrope
        binding = bind_decoder(checkpoint, tp=1, dtype=platform_of_mesh(mesh).default_dtype)
        self._weights = tuple(jax.tree.leaves(load(checkpoint, binding, mesh)))
        # Room for the rows of one question's images.
        pool = (0, 0) if self._encoder is None else (1024, self._encoder.row_width)
        shapes = LmShapes(self._config.pages_per_seq, *pool)
        self._lm = LanguageModel(binding.graphdef, binding.abstract, mesh, self._config, shapes)
        self._packer = Packer(self._config, self._config.pages_per_seq, gather_pages=self._lm.gather_pages)
        self._compiled: dict[str, Any] = {}
        self._caches, self._seats = self._lm.new_caches(), self._lm.new_seats()

    def _run(self, program: Any, *args: Any) -> Any:
        if program.name not in self._compiled:
            self._compiled[program.name] = program.compile()
        return self._compiled[program.name](self._weights, *args)

    def _keep(self, out: Any) -> int:
        """The likeliest next token of a pass of one request."""
        self._caches, self._seats = out.caches, out.seats
        return int(np.asarray(out.logits)[0].argmax())

    def _request(self, prompt: Prompt) -> tuple[Request, Any]:
        """The request, and the rows of its images as a pool of their own."""
        ids, spans = prompt.ids, prompt.images
        positions, delta = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids))), 0
        if self._encoder is not None and self._mrope:
            merge = self._encoder.vision_config.merge_size
            positions, delta = mrope_positions(len(ids), [(s.start, s.image.grid_thw) for s in spans], merge)
        seq = Request(
            Submission("", ids, spans, SamplingParams(MAX_TOKENS)), lambda event: None, positions, delta, seed=0
        )
        seq.add_pages(range(self._config.pages_per_seq))
        seq.seat = 0
        if self._encoder is None:
            return seq, None
        pool, at = np.zeros((1024, self._encoder.row_width), np.float32), 0
        for i, (span, rows) in enumerate(zip(spans, self._encoder.encode([s.image for s in spans]), strict=True)):
            pool[at : at + len(rows)] = rows
            seq.slots[i] = np.arange(at, at + span.image.num_tokens, dtype=np.int32)
            at += span.image.num_tokens
        return seq, jnp.asarray(pool, self._lm.dtype)

    def answer(self, question: Question) -> str:
        prepare = None if self._encoder is None else self._encoder.processor.prepare
        prompt = self.texts.prompt(question, prepare)
        seq, pool = self._request(prompt)
        size, token = len(prompt.ids), 0
        for start in range(0, size, self._config.prefill_tokens):
            chunk = Chunk(seq, start, min(start + self._config.prefill_tokens, size), self._lm.row_align)
            rows = bucket_for(self._config.token_buckets, chunk.rows)
            ids, pool_index, step = self._packer.extend([chunk], rows)
            images = () if pool is None else (pool, pool_index)
            inputs = self._run(self._lm.splice(rows), ids, *images)
            if pool is None:
                inputs = (inputs, None)
            program = self._lm.extend(rows, Selection(None, platform=self._lm.platform))
            token = self._keep(self._run(program, inputs, self._caches, step.packed(), samples_of([], 1), self._seats))
        made: list[int] = []
        seq.computed = size
        while token not in self.texts.tokenizer.eos_ids and len(made) < MAX_TOKENS:
            made.append(token)
            seq.tokens.append(token)
            step, latest = self._packer.decode([seq], 1).packed(), np.array([token], np.int32)
            token = self._keep(
                self._run(self._lm.decode(1), latest, self._caches, step, samples_of([seq], 1), self._seats)
            )
            seq.computed += 1
        return self.texts.answer(made)


def over_http(port: int, questions: Sequence[Question], together: int = 64) -> list[str]:
    """Greedy answers of the server at this port, `together` requests at one time. Raises RuntimeError when one
    fails."""
    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(lambda question: _ask(port, question), questions))


def _ask(port: int, question: Question) -> str:
    common: Mapping[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0}
    if question.ids:
        path, body = "/v1/completions", common | {"prompt": list(question.ids)}
    else:
        uris = ["data:image/png;base64," + base64.b64encode(file).decode() for file in question.images]
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
        parts.append({"type": "text", "text": question.text})
        path, body = "/v1/chat/completions", common | {"messages": [{"role": "user", "content": parts}]}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1200)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        told = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status}: {told['error']['message']}")
    choice = told["choices"][0]
    return (choice["text"] if question.ids else choice["message"]["content"]).strip()
