"""An engine on the embedded digit reader, without HTTP."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from scripts.lib.server_process import HELD
from serving.cli import DIGITS_FOLDER
from serving.config import EngineConfig
from serving.engine import Engine
from serving.load import load_engine
from serving.metrics import Metrics
from serving.protocol import ImageSpan, SamplingParams, Submission, TokenEvent
from serving.tokenizer import Tokenizer
from vitbatch import BucketLadder, CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh

DIGITS = sorted((DIGITS_FOLDER.parent / "digits").glob("*.png"))
PHOTOS = sorted(p for p in (Path(__file__).parents[1] / "data" / "photos").iterdir() if p.suffix != ".md")
CONFIG = EngineConfig(tp=2, max_model_len=176, page_size=8, max_seqs=8, prefill_tokens=128, max_queue=40)
IMAGES = EncoderConfig(ladder=BucketLadder((256,)), pool_tokens=150)


class Server:
    """An engine with its tokenizer; asks in the demo model's chat format."""

    def __init__(self, config: EngineConfig = CONFIG, images: EncoderConfig = IMAGES, folder: Path = DIGITS_FOLDER):
        self.tokenizer = Tokenizer.from_checkpoint(folder)
        self.metrics, self.guard = Metrics(), CompileGuard()
        self.engine = load_engine(
            Checkpoint(folder),
            make_mesh(config.tp),
            config,
            images,
            model_name="digits",
            eos_ids=self.tokenizer.eos_ids,
            metrics=self.metrics,
            guard=self.guard,
        ).engine
        self.runner = self.engine._runner
        self.prepare = self.runner.encoder.processor.prepare
        self._ids = count()

    @contextmanager
    def another_engine(self, **changes) -> Iterator[Engine]:
        """Serves with a new engine over the same warmed programs, its configuration changed, until the block is left.
        The one before may be asleep, but not at work."""
        before = self.engine
        assert not before._known
        config = replace(before._config, **changes)
        self.engine = Engine(
            self.runner,
            config,
            model_name="digits",
            eos_ids=self.tokenizer.eos_ids,
            metrics=self.metrics,
            guard=self.guard,
            uses_mrope=True,
        )
        self.engine.start()
        try:
            yield self.engine
        finally:
            try:
                assert self.engine.drain(30.0), "the engine did not drain"
                assert self.idle(), "a page or a pool row leaked"
            finally:
                self.engine.stop("the test is over")
                self.engine = before

    def prompt(self, *images, text="digit?"):
        """(ids, spans) of one user turn."""
        encode, ids, spans = self.tokenizer.encode_prompt, [], []
        ids += encode("<|im_start|>user\n")
        for image in images:
            ids += encode("<|vision_start|>")
            spans.append(ImageSpan(len(ids), image))
            ids += [self.tokenizer.image_token_id] * image.num_tokens + encode("<|vision_end|>")
        return ids + encode(f"{text}<|im_end|>\n<|im_start|>assistant\n"), tuple(spans)

    def submit(self, ids, spans=(), on_token=lambda token: None, salt="", **params):
        """A future of (text, FinishEvent or ErrorEvent); its request_id attribute names the request."""
        params = {"max_tokens": 6, "temperature": 0.0} | params
        tokens, done = [], Future()
        done.request_id = f"r{next(self._ids)}"

        def on_event(event):
            if isinstance(event, TokenEvent):
                tokens.append(event.token_id)
                on_token(event.token_id)
            else:
                text = b"".join(self.tokenizer.token_bytes(t) for t in tokens).decode(errors="replace")
                done.set_result((text, event))

        self.engine.submit(Submission(done.request_id, ids, spans, SamplingParams(**params), salt), on_event)
        return done

    def ask(self, *images, text="digit?", **params):
        return self.submit(*self.prompt(*images, text=text), **params)

    def settled(self, seconds=20.0):
        """Whether nothing is held once every request is over; waits for the last step."""
        deadline = time.monotonic() + seconds
        while self.engine._known or not self.idle():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def close(self):
        """Lets everything end; True when it did."""
        drained = self.engine.drain(20.0)
        self.guard.close()
        return drained

    def idle(self):
        """Nothing runs and nothing is held: no seat, no page, no pool row, and the gauges say so. What is counted and
        what is there must agree, so a page that was leaked or freed twice raises."""
        self.engine.check_invariants()
        scheduler, value = self.engine._scheduler, self.metrics.registry.get_sample_value
        zero = all(value(f"vitstripe_{gauge}") == 0 for gauge in HELD)
        nothing = not scheduler.running and not scheduler.waiting and scheduler.pages.used == 0
        return nothing and not self.engine._known and self.runner.encoder.cache.tokens_pinned == 0 and zero
