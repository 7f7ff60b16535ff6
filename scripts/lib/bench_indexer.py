"""Times the indexer on this machine: scoring, each selection, and both together replicated and striped.

Needs the project's packages; `scripts/bench_indexer` brings them, or run this file in an environment of your own.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsa_indexer import RowBatch, topk_rows
from dsa_indexer.scores import ROW_TILE, row_scores
from dsa_indexer.stripes import imbalance, take_owned
from dsa_indexer.topk import IMPLEMENTATIONS, select_topk
from vitstripe.platform import platform_of

EXPLAIN = """\
share of floor   floor over time: what a device could do if it only multiplied (scores), only read the scores once
                 (selections), or both. The floor's rates are measured in this run: one large matrix product, one copy.
a device's share the rows that the busiest of `tp` devices owns, scored and selected on this one device. The merge is
                 not in it.
Medians; several dispatches a synchronisation. Every implementation is checked to give the same bits first."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_indexer",
        description="Times each implementation of the selection, the scoring, and both together: replicated, and one "
        "device's striped share. Prints a table and writes JSON.",
        epilog="example: scripts/bench_indexer --quick --json bench.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one small shape, few repetitions")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096], metavar="M")
    parser.add_argument("--keys", type=int, nargs="+", default=[32768, 131072], metavar="N")
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tp", type=int, default=8, help="devices that the rows are striped over")
    parser.add_argument("--stripe", type=int, default=64, help="rows of a stripe")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each line")
    parser.add_argument("--skip", nargs="*", default=[], metavar="TEXT", help="leave out lines that contain this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def median_seconds(fn: Callable[..., Any], args: tuple, seconds: float) -> float:
    """Median over groups of dispatches with one synchronisation each."""
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    once = time.perf_counter() - start
    group = max(1, min(20, int(seconds / 5 / max(once, 1e-6))))
    times, until = [], time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < until and len(times) < 50):
        start = time.perf_counter()
        for _ in range(group):
            out = fn(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / group)
        if once > seconds:
            break
    return float(np.median(times))


def measured_floor(dtype, seconds: float, size: int, copy_bytes: int) -> tuple[float, float]:
    """FLOP/s of a square matrix product in dtype, bytes/s read by a copy (half of what it moves)."""
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda a: lax.dot(a, a, preferred_element_type=dtype))
    flops = 2 * size**3 / median_seconds(multiply, (a,), seconds)
    b = jnp.ones(copy_bytes // 4, jnp.float32)
    return flops, 2 * copy_bytes / median_seconds(jax.jit(lambda b: b + 1), (b,), seconds)


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.lines = options, []
        self.device = platform_of(jax.devices()[0])
        self.dtype = self.device.default_dtype
        on_cpu = self.device.kind == "cpu"
        self.flops, self.bytes = measured_floor(
            self.dtype, options.seconds, 1024 if on_cpu else 8192, (64 if on_cpu else 1024) << 20
        )
        print(f"{self.device.name} ({self.device.kind}), jax {jax.__version__}, {jnp.dtype(self.dtype)}")
        print(f"floor: {self.flops / 1e12:.2f} TFLOP/s in a {'1024' if on_cpu else '8192'}^3 product, ", end="")
        print(f"{self.bytes / 1e9:.0f} GB/s in a copy (read and written)\n")
        print(f"{'rows':>6} {'keys':>7} {'what':<34} {'ms':>10} {'floor ms':>9} {'share':>6}")

    def line(self, rows: int, keys: int, what: str, fn: Callable[..., Any], args: tuple, floor: float) -> Any:
        """Times one line, prints it, and returns the result, None if it is left out or failed."""
        if any(text in what for text in self.options.skip):
            return None
        found: dict[str, Any] = {"rows": rows, "keys": keys, "what": what, "floor_seconds": floor}
        self.lines.append(found)
        try:
            compiled = jax.jit(fn).lower(*args).compile()
            out = jax.block_until_ready(compiled(*args))
            found["seconds"] = median_seconds(compiled, args, self.options.seconds)
        except Exception as error:  # one line that cannot run must not lose the others
            found["error"] = f"{type(error).__name__}: {error}"
            print(f"{rows:>6} {keys:>7} {what:<34} {found['error'][:60]}", flush=True)
            return None
        share = floor / found["seconds"]
        print(
            f"{rows:>6} {keys:>7} {what:<34} {1e3 * found['seconds']:>10.3f} {1e3 * floor:>9.3f} {share:>6.1%}",
            flush=True,
        )
        return out

    def shape(self, num_rows: int, num_keys: int) -> None:
        o = self.options
        rng = np.random.default_rng(0)
        q, gates, keys = (
            jnp.asarray(rng.normal(size=shape), dtype)
            for shape, dtype in (
                ((num_rows, o.heads, o.dim), self.dtype),
                ((num_rows, o.heads), jnp.float32),
                ((num_keys, o.dim), self.dtype),
            )
        )
        # The last rows of a causal prompt, or all of them and some without keys.
        lengths_np = np.maximum(np.arange(num_keys - num_rows + 1, num_keys + 1), 0).astype(np.int32)
        lengths, ks = jnp.asarray(lengths_np), jnp.zeros(num_rows, jnp.int32)
        pairs = int(lengths_np.sum(dtype=np.int64))
        multiply, read = 2 * o.heads * o.dim * pairs / self.flops, 4 * pairs / self.bytes

        score = partial(row_scores, key_scales=None)
        scores = self.line(
            num_rows,
            num_keys,
            "scores",
            lambda q, gates, keys, ks, lengths: score(q, gates, keys, ks=ks, lengths=lengths),
            (q, gates, keys, ks, lengths),
            multiply,
        )
        for name, values in (("", scores), ("tied, ", jnp.zeros((num_rows, num_keys)))):
            if values is None:
                values = jnp.asarray(rng.normal(size=(num_rows, num_keys)), jnp.float32)
            results = {}
            for implementation in IMPLEMENTATIONS:
                run = partial(select_topk, k=o.k, implementation=implementation)
                out = self.line(num_rows, num_keys, f"select, {name}{implementation}", run, (values, ks, lengths), read)
                if out is not None:
                    results[implementation] = np.asarray(out)
            if len({result.tobytes() for result in results.values()}) > 1:
                raise SystemExit(f"error: {', '.join(results)} select different keys")
        del scores

        both = partial(topk_rows, k=o.k)
        whole = self.line(
            num_rows,
            num_keys,
            "score and select, replicated",
            lambda q, gates, keys, rows: both(q, gates, keys, None, rows),
            (q, gates, keys, RowBatch(ks, lengths)),
            multiply + read,
        )
        balance = imbalance(lengths_np, o.stripe, o.tp)

        def own_share(q, gates, keys, ks, lengths):
            # The last device owns the longest rows where stripes fill the rows.
            take = partial(take_owned, device=jnp.int32(o.tp - 1), stripe=o.stripe, tp=o.tp)
            return both(take(q), take(gates), keys, None, RowBatch(take(ks), take(lengths)))

        share = self.line(
            num_rows,
            num_keys,
            f"score and select, 1 of {o.tp} devices",
            own_share,
            (q, gates, keys, ks, lengths),
            (multiply + read) * balance / o.tp,
        )
        self.lines[-1]["balance"] = balance
        if whole is not None and share is not None and num_rows % (o.tp * o.stripe) == 0:
            own = np.asarray(take_owned(whole, jnp.int32(o.tp - 1), o.stripe, o.tp))
            if not np.array_equal(own, np.asarray(share)):
                raise SystemExit("error: the striped share selects other keys than the replicated program")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.quick:
        on_cpu = platform_of(jax.devices()[0]).kind == "cpu"
        options.rows, options.keys = [64 if on_cpu else 1024], [4096 if on_cpu else 32768]
        options.seconds = min(options.seconds, 0.3)
        if on_cpu:
            options.tp, options.stripe = 2, ROW_TILE
    bench = Bench(options)
    for num_keys in options.keys:
        for num_rows in options.rows:
            bench.shape(num_rows, num_keys)
    print("\n" + EXPLAIN)
    if options.json:
        head = {
            "device": bench.device.name,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "dtype": str(jnp.dtype(bench.dtype)),
            "flops": bench.flops,
            "copy_bytes": bench.bytes,
            "k": options.k,
            "heads": options.heads,
            "dim": options.dim,
            "tp": options.tp,
            "stripe": options.stripe,
        }
        options.json.write_text(json.dumps(head | {"lines": bench.lines}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
