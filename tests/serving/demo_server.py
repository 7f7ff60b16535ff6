"""An engine on the embedded digit reader, without HTTP."""

from concurrent.futures import Future
from itertools import count
from pathlib import Path

from serving.cli import DEMO_FOLDER
from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from serving.protocol import ImageSpan, SamplingParams, Submission, TokenEvent
from serving.tokenizer import Tokenizer
from vitbatch import BucketLadder, CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh

DIGITS = sorted((DEMO_FOLDER.parent / "digits").glob("*.png"))
PHOTOS = sorted(p for p in (Path(__file__).parents[1] / "data" / "photos").iterdir() if p.suffix != ".md")
CONFIG = EngineConfig(tp=2, max_model_len=176, page_size=8, max_seqs=8, prefill_tokens=128, max_queue=40)
IMAGES = EncoderConfig(ladder=BucketLadder((256,)), pool_tokens=150)


class Server:
    """An engine with its tokenizer; asks in the demo model's chat format."""

    def __init__(self, config: EngineConfig = CONFIG, images: EncoderConfig = IMAGES, folder: Path = DEMO_FOLDER):
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

    def prompt(self, *images, text="digit?"):
        """(ids, spans) of one user turn."""
        encode, ids, spans = self.tokenizer.encode_prompt, [], []
        ids += encode("<|im_start|>user\n")
        for image in images:
            ids += encode("<|vision_start|>")
            spans.append(ImageSpan(len(ids), image))
            ids += [self.tokenizer.image_token_id] * image.num_tokens + encode("<|vision_end|>")
        return ids + encode(f"{text}<|im_end|>\n<|im_start|>assistant\n"), tuple(spans)

    def submit(self, ids, spans=(), on_token=lambda token: None, **params):
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

        self.engine.submit(Submission(done.request_id, ids, spans, SamplingParams(**params)), on_event)
        return done

    def ask(self, *images, text="digit?", **params):
        return self.submit(*self.prompt(*images, text=text), **params)

    def close(self):
        """Lets everything end; True when it did."""
        drained = self.engine.drain(20.0)
        self.guard.close()
        return drained

    def idle(self):
        """Nothing runs, nothing is held."""
        scheduler, cache = self.engine._scheduler, self.runner.encoder.cache
        return not scheduler.running and scheduler.pages.used == 0 and cache.tokens_pinned == 0
