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
from flax import nnx
from jax import lax

from dsa_indexer import Indexer, IndexerConfig, RowBatch, inverse_frequencies, project_rows, rope_tables, topk_rows
from dsa_indexer.chunks import LOGITS_BYTES
from dsa_indexer.scores import ROW_TILE, row_scores
from dsa_indexer.stripes import imbalance, take_owned
from dsa_indexer.topk import IMPLEMENTATIONS, select_topk
from vitstripe.platform import platform_of

EXPLAIN = """\
share of floor   floor over time: what a device could do if it only multiplied (scores), only read the scores once
                 (selections), or both. The floor's rates are measured in this run: one large matrix product, one copy.
a device's share the rows that the busiest of `tp` devices owns, scored and selected on this one device. The merge is
                 not in it.
whole layer      a prompt without a prefix, from hidden states to the selection; each device projects all keys and its
                 own rows' queries. Heavily tied: 37 different keys.
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
    parser.add_argument("--layer-rows", type=int, default=32768, metavar="M", help="rows of the whole-layer lines")
    parser.add_argument("--hidden", type=int, default=6144, help="hidden size of the whole-layer lines")
    parser.add_argument("--q-lora", type=int, default=2048, help="width of the queries' input there")
    parser.add_argument("--logits-mib", type=int, default=LOGITS_BYTES >> 20, help="MiB of scores alive at once")
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
            for implementation in (*([None] if self.device.runs_kernels else []), *IMPLEMENTATIONS):
                run = partial(select_topk, k=o.k, implementation=implementation)
                what = f"select, {name}{implementation or 'kernel'}"
                out = self.line(num_rows, num_keys, what, run, (values, ks, lengths), read)
                if out is not None:
                    results[what] = np.asarray(out)
            if len({result.tobytes() for result in results.values()}) > 1:
                raise SystemExit(f"error: {', '.join(results)} select different keys")
        del scores

        both = partial(topk_rows, k=o.k, logits_bytes=o.logits_mib << 20)
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
        if share is not None:
            self.lines[-1]["balance"] = balance
        if whole is not None and share is not None and num_rows % (o.tp * o.stripe) == 0:
            own = np.asarray(take_owned(whole, jnp.int32(o.tp - 1), o.stripe, o.tp))
            if not np.array_equal(own, np.asarray(share)):
                raise SystemExit("error: the striped share selects other keys than the replicated program")

    def layer(self, num_rows: int) -> None:
        """A prompt of num_rows tokens without a prefix: what each of tp devices does, in turn, beside the whole."""
        o, half = self.options, 32
        config = IndexerConfig(
            num_heads=o.heads,
            head_dim=o.dim,
            topk=o.k,
            rope_dim=min(2 * half, o.dim),
            rope_theta=8e6,
            q_lora_rank=o.q_lora,
            hidden_size=o.hidden,
            layer_types=("full",),
        )
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Indexer(config, self.dtype)))
        rng, leaves = np.random.default_rng(0), jax.tree.structure(state)
        state = jax.tree.unflatten(
            leaves,
            [jnp.asarray(rng.normal(size=x.shape) / x.shape[-1] ** 0.5, x.dtype) for x in jax.tree.leaves(state)],
        )
        x, q_lora = (
            jnp.asarray(rng.standard_normal((num_rows, n), np.float32), self.dtype) for n in (o.hidden, o.q_lora)
        )
        cos, sin = rope_tables(jnp.arange(num_rows), inverse_frequencies(config.rope_dim, config.rope_theta))
        lengths = jnp.arange(1, num_rows + 1, dtype=jnp.int32)
        rows = RowBatch(jnp.zeros_like(lengths), lengths)
        pairs = num_rows * (num_rows + 1) // 2
        floor = 2 * o.heads * o.dim * pairs / self.flops + 4 * pairs / self.bytes
        select = partial(topk_rows, k=o.k, logits_bytes=o.logits_mib << 20)

        def queries(state, inputs):
            return project_rows(nnx.merge(graphdef, state).queries, inputs, batch=num_rows)

        def keys_of(state, x, cos, sin):
            return nnx.merge(graphdef, state).keys(x, cos, sin)

        def own(device, values):
            return jax.tree.map(lambda x: take_owned(x, device, o.stripe, o.tp), values)

        def whole_layer(state, x, q_lora, cos, sin, rows):
            return select(*queries(state, (x, q_lora, cos, sin)), keys_of(state, x, cos, sin), None, rows)

        def own_layer(state, x, q_lora, cos, sin, rows, device):
            inputs, rows = own(device, ((x, q_lora, cos, sin), rows))
            return select(*queries(state, inputs), keys_of(state, x, cos, sin), None, rows)

        def whole_scores(q, gates, keys, rows):
            return select(q, gates, keys, None, rows)

        def own_scores(q, gates, keys, rows, device):
            (q, gates), rows = own(device, ((q, gates), rows))
            return select(q, gates, keys, None, rows)

        inputs = (state, x, q_lora, cos, sin)
        q, gates = jax.jit(queries)(state, inputs[1:])
        keys = jax.jit(keys_of)(state, x, cos, sin)
        few = jnp.asarray(rng.integers(0, 37, num_rows))  # 37 different keys: each score of a row comes many times
        for what, whole, part, args in (
            ("score and select", whole_scores, own_scores, (q, gates, keys)),
            ("the same, heavily tied", whole_scores, own_scores, (q, gates, keys[few])),
            ("whole layer", whole_layer, own_layer, inputs),
        ):
            found = self.line(num_rows, num_rows, f"{what}, replicated", whole, (*args, rows), floor)
            if found is None:
                continue
            replicated, shares = self.lines[-1]["seconds"], []
            compiled = jax.jit(part).lower(*args, rows, jnp.int32(0)).compile()
            for device in range(o.tp):
                mine = (*args, rows, jnp.int32(device))
                same = take_owned(found, jnp.int32(device), o.stripe, o.tp)
                if num_rows % (o.tp * o.stripe) == 0 and not np.array_equal(compiled(*mine), same):
                    raise SystemExit(f"error: {what}: device {device} selects other keys than the replicated program")
                shares.append(median_seconds(compiled, mine, self.options.seconds / 2))
            ratio = max(shares) * o.tp / replicated
            self.lines.append({"rows": num_rows, "what": what, "shares": shares, "ratio": ratio})
            print(
                f"{num_rows:>6} {num_rows:>7} {what}: the slowest of {o.tp} devices takes {1e3 * max(shares):.3f} ms, "
                f"the fastest {1e3 * min(shares):.3f}: {ratio:.3f} / {o.tp} of replicated",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.quick:
        on_cpu = platform_of(jax.devices()[0]).kind == "cpu"
        options.rows, options.keys = [64 if on_cpu else 1024], [4096 if on_cpu else 32768]
        options.seconds = min(options.seconds, 0.3)
        if on_cpu:
            options.tp, options.stripe = 2, ROW_TILE
            options.layer_rows, options.hidden, options.q_lora, options.k = 256, 256, 128, min(options.k, 64)
    bench = Bench(options)
    for num_keys in options.keys:
        for num_rows in options.rows:
            bench.shape(num_rows, num_keys)
    bench.layer(options.layer_rows)
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
