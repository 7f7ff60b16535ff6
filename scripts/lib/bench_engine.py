"""What the engine's thread does with a decode step, without HTTP: a server's engine with random weights answers as many
requests at once as the batch holds, and every call of a program is timed on the host. `scripts.lib.bench_passes` times
the decode pass of the same shape by itself.

The ways differ in how the arrays of a step reach the devices and in whether another thread of the process is busy, as
the one is that writes to clients.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scripts.lib.made_up_model import SHAPES, write_folder
from scripts.lib.made_up_server import use_random_weights
from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from serving.protocol import SamplingParams, Submission, TokenEvent
from vitbatch import BucketLadder, CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh
from vitstripe.platform import platform_of


@dataclass(frozen=True)
class StepTime:
    """Milliseconds a decode step: wall clock, the host's time in each program's call and in placing arrays, and what
    the engine's thread did by its own count."""

    way: str
    step: float
    calls: dict[str, float]
    placing: float
    doing: dict[str, float]


class Watched:
    """A program whose calls are timed; `place` puts what is not on the devices there first."""

    def __init__(self, program: Any):
        self.program, self.place = program, False
        self.seconds = self.placing = 0.0

    def __call__(self, *args: Any) -> Any:
        if self.place:
            begin = time.perf_counter()
            to = self.program.input_shardings[0]
            args = jax.tree.map(lambda x, at: jax.device_put(x, at) if isinstance(x, np.ndarray) else x, args, to)
            self.placing += time.perf_counter() - begin
        begin = time.perf_counter()
        out = self.program(*args)
        self.seconds += time.perf_counter() - begin
        return out


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that makes and reads JSON without end."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            json.loads(json.dumps({"choices": [{"index": i, "delta": {"content": "token"}} for i in range(8)]}))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Doing(Metrics):
    """Also keeps the seconds by what the engine's thread did."""

    def __init__(self, name: str):
        super().__init__(name)
        self.seconds = dict.fromkeys(("plan", "dispatch", "wait", "tell"), 0.0)

    def spent(self, doing: str, seconds: float) -> None:
        super().spent(doing, seconds)
        self.seconds[doing] += seconds


class Bench:
    """An engine of a shape with `running` seats on tp devices."""

    def __init__(self, shape: str, tp: int, *, running: int, prompt: int, tokens: int):
        self.prompt, self.tokens, self.running = prompt, tokens, running
        config = EngineConfig(
            tp=tp, max_model_len=-(-(prompt + tokens) // 64) * 64, max_seqs=running, prefix_cache=False
        )
        self.metrics = Doing("bench")
        use_random_weights()
        with tempfile.TemporaryDirectory() as folder:
            self.engine = load_engine(
                Checkpoint(write_folder(Path(folder), shape)),
                make_mesh(tp),
                config,
                # No request has an image: the least ladder there is.
                EncoderConfig(ladder=BucketLadder((1024,))),
                model_name="bench",
                eos_ids=frozenset(),
                metrics=self.metrics,
                guard=CompileGuard(),
            ).engine
        runner = self.engine._runner
        self.vocabulary = runner.lm.decoder.vocab_size
        self.watched = {name: Watched(program) for name, program in runner.programs.items()}
        runner.programs.update(self.watched)
        self.engine.start()
        self._rounds = 0

    def _counts(self) -> tuple[int, float, dict[str, float], float, dict[str, float]]:
        calls = {name: watched.seconds for name, watched in self.watched.items()}
        placing = sum(watched.placing for watched in self.watched.values())
        return self.engine.steps, time.perf_counter(), calls, placing, dict(self.metrics.seconds)

    def measure(self, way: str, *, place: bool, busy: bool) -> StepTime:
        """One burst: from the last request's second token to the first request's last but one."""
        for watched in self.watched.values():
            watched.place = place
        draw, self._rounds = np.random.default_rng(self._rounds), self._rounds + 1
        seen, at, over = [0] * self.running, [], threading.Semaphore(0)

        def receiver(i: int) -> Callable[[Any], None]:
            def take(event: Any) -> None:
                # On the engine's thread, so the counts are those of one moment.
                if not isinstance(event, TokenEvent):
                    over.release()
                    return
                seen[i] += 1
                if (not at and min(seen) == 2) or (len(at) == 1 and max(seen) == self.tokens - 1):
                    at.append(self._counts())

            return take

        params = SamplingParams(self.tokens, temperature=0.0, ignore_eos=True)
        with busy_thread() if busy else nullcontext():
            for i in range(self.running):
                ids = draw.integers(0, self.vocabulary, self.prompt).tolist()
                self.engine.submit(Submission(f"{self._rounds}-{i}", ids, (), params), receiver(i))
            for _ in range(self.running):
                over.acquire()
        if len(at) < 2:
            raise SystemExit("error: the first answer ended before the last had begun; ask for more --tokens")
        (steps, begin, calls, placing, doing), (steps_after, end, calls_after, placing_after, doing_after) = at
        each = (steps_after - steps) / 1e3
        return StepTime(
            way,
            (end - begin) / each,
            {n: (calls_after[n] - s) / each for n, s in calls.items() if calls_after[n] > s},
            (placing_after - placing) / each,
            {n: (s - doing[n]) / each for n, s in doing_after.items()},
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--running", type=int, default=64, help="requests at once (default 64)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens a prompt (default 64)")
    parser.add_argument("--tokens", type=int, default=192, help="tokens an answer (default 192)")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.tp)
    bench = Bench(options.shape, options.tp, running=options.running, prompt=options.prompt, tokens=options.tokens)
    found = []
    for place in (False, True):
        for busy in (False, True):
            arrays, beside = "put first" if place else "as numpy", "beside a busy thread" if busy else "alone"
            found.append(bench.measure(f"{arrays}, {beside}", place=place, busy=busy))
            one = found[-1]
            parts = {**one.calls, "placing": one.placing, **{f"[{n}]": ms for n, ms in one.doing.items()}}
            print(f"{one.way}: {one.step:.2f} ms a step", *(f"{n} {ms:.2f}" for n, ms in parts.items()), sep="  ")
    bench.engine.drain(30)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        about = {"device": asdict(platform_of(jax.devices()[0])), "jax": jax.__version__, **settings}
        options.json.write_text(json.dumps({**about, "ways": [asdict(way) for way in found]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
