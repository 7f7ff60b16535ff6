"""Times what the host does between two steps of the engine, without devices: planning and packing a decode pass of many
running requests (and the prefill pass of those that arrive), and taking in the tokens of the pass before.

Needs the project's packages; `scripts/bench_scheduler` brings them, or run this file in an environment of your own.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from serving.batch import Packer, samples_after, samples_of
from serving.config import EngineConfig, bucket_for
from serving.protocol import SamplingParams, Submission
from serving.scheduler import Chunk, Scheduler
from serving.sequence import Sequence


class Loop:
    """The engine's step without devices: one step in flight, every token is 7."""

    def __init__(self, config: EngineConfig, prompts: list[int]):
        pages = sum(-(-(n + config.max_model_len // 8) // config.page_size) for n in prompts) + 64
        self.config = config
        self.scheduler = Scheduler(config, pages)
        self.packer = Packer(config, pages, gather_pages=0)
        self.chunks: list[Chunk] = []
        self.due: list[Sequence] = []
        self._orders = 0
        for length in prompts:
            self.arrive(length)
        while any(s.in_prefill for s in self.scheduler.running) or self.scheduler.waiting:
            self.plan()
            self.collect()

    def arrive(self, length: int) -> None:
        self._orders += 1
        ids = np.random.default_rng(self._orders).integers(0, 50_000, length).tolist()
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
        params = SamplingParams(self.config.max_model_len, temperature=0.7, top_p=0.9)
        seq = Sequence(Submission(str(self._orders), ids, (), params), lambda event: None, positions, 0, 1)
        seq.order = self._orders
        self.scheduler.add(seq)

    def plan(self) -> None:
        """Everything before a dispatch: both passes planned and packed."""
        planned = self.scheduler.decode()
        assert planned is not None
        due, _ = planned
        self.scheduler.admit()
        chunks = self.scheduler.prefill(self.chunks)
        if chunks:
            rows = bucket_for(self.config.token_buckets, sum(c.rows for c in chunks))
            self.packer.extend(chunks, rows)[2].packed()
            samples_after(chunks, self.config.max_seqs)
        if due:
            size = bucket_for(self.config.batch_buckets, len(due))
            self.packer.decode(due, size).packed()
            samples_of(due, size)
        for chunk in chunks:
            chunk.seq.computed = chunk.stop
            if chunk.finishes_prompt:
                chunk.seq.in_prefill, chunk.seq.pending = False, 1
        for seq in due:
            seq.computed, seq.pending = seq.length, 1
        self.chunks, self.due = chunks, due

    def collect(self) -> None:
        """Everything after the tokens have come: pages published, tokens taken in."""
        for chunk in self.chunks:
            self.scheduler.publish(chunk.seq, chunk.stop)
        for seq in self.due:
            self.scheduler.publish(seq, len(seq.tokens))
        for seq in (*self.due, *(c.seq for c in self.chunks if not c.seq.in_prefill)):
            seq.pending = 0
            seq.tokens.append(7)
        self.chunks, self.due = [], []


def milliseconds(loop: Loop, steps: int, before: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Median and 99th percentile of the parts of a step, and the median of the processor time, which a busy machine
    does not stretch as much. before: runs ahead of each step, not timed."""
    clocks: list[list[tuple[float, float]]] = []
    for _ in range(steps):
        before()
        marks = [(time.perf_counter(), time.thread_time())]
        for part in (loop.plan, loop.collect):
            part()
            marks.append((time.perf_counter(), time.thread_time()))
        clocks.append(marks)
    spent = np.diff(np.array(clocks), axis=1) * 1e3
    return {
        name: {
            "median": float(np.median(spent[:, i, 0])),
            "p99": float(np.quantile(spent[:, i, 0], 0.99)),
            "cpu_median": float(np.median(spent[:, i, 1])),
        }
        for i, name in enumerate(("plan", "collect"))
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_scheduler",
        description="Milliseconds the host needs to plan one step of many running requests.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=256, help="running requests")
    parser.add_argument("--steps", type=int, default=200, help="steps to time")
    parser.add_argument("--context", type=int, default=8192, help="longest request, in tokens")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a cache page")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    config = EngineConfig(
        max_model_len=args.context, page_size=args.page_size, max_seqs=args.requests, prefill_tokens=2048
    )
    prompts = np.random.default_rng(0).integers(args.context // 64, args.context * 3 // 4, args.requests).tolist()
    loop = Loop(config, prompts)
    # What the set-up left behind is not part of a step.
    gc.collect()
    gc.freeze()
    results = {"decode": milliseconds(loop, args.steps, lambda: None)}

    def one_leaves_one_comes() -> None:
        if not loop.scheduler.waiting:
            loop.scheduler.remove(loop.scheduler.running[-1])
            loop.arrive(args.context // 8)

    results["decode and prefill"] = milliseconds(loop, args.steps, one_leaves_one_comes)
    if args.json:
        print(json.dumps({"requests": args.requests, "milliseconds": results}))
        return 0
    print(f"{args.requests} running requests of {min(prompts)} to {max(prompts)} tokens, {args.steps} steps")
    for kind, parts in results.items():
        for part, t in parts.items():
            spread = f"median {t['median']:6.2f} ms   p99 {t['p99']:6.2f} ms"
            print(f"  {kind:<20} {part:<8} {spread}   processor {t['cpu_median']:6.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
