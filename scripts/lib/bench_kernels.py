"""Times the kernels on this machine's GPU, beside what a user would pick instead.

Needs the project's packages; `scripts/bench_kernels` brings them, or run `python -m scripts.lib.bench_kernels` in an
environment of your own. torch is used for its topk if it is installed.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dsa_indexer import KeyFormat, LatentRows, encode_latents, sparse_mla
from dsa_indexer.scores.triton import row_scores_triton
from dsa_indexer.topk.triton import select_topk_triton
from serving.config import ROW_TILE, STATE_CHUNK
from serving.models.delta_rule import delta_chunked, delta_recurrent, delta_step, l2_normalise
from serving.models.grouped_matmul import grouped_matmul
from serving.models.paged_attention.triton import paged_attention_triton
from vitbatch.attention.triton import attend_triton
from vitbatch.config import align
from vitbatch.lanes import Segments
from vitstripe.platform import PLAIN, Platform, platform_of

CACHE_BYTES = 256 << 20
"""Input sets are rotated until they hold at least this much, so that no run finds its inputs in the cache."""
GROUP, GROUPS = 20, 7  # dispatches a synchronisation; their median is taken over the groups
PARTS = ("attention", "scores", "selection", "sparse", "paged", "delta", "experts")
EXPLAIN = """\
TFLOP/s count useful work only: 4 * tokens^2 * head dim * heads for attention, 2 * dim * heads for each pair of a row
and a key it sees for scores, 6 * keys * values * heads for each token of the delta rule, 2 * inputs * outputs for each
row that an expert takes. TB/s of a selection count one read of the scores, those of a paged decode one of keys and
values, those of the delta rule's step one read and one write of the states, those of few rows an expert one read of the
experts that have any. floor: the useful work at the rate of an 8192^3 bfloat16 product, or the read at the rate of a
large copy (read and written), both measured in this run."""


@dataclass(frozen=True)
class Line:
    """One line of the table. amount: operations or bytes of useful work; floor: seconds they take at best."""

    work: str
    what: str
    seconds: float
    amount: float
    unit: str
    floor: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds / 1e12


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_kernels",
        description="Times packed, sparse and paged attention, index scores, selection and the delta rule on a GPU: "
        "medians, random data, everything in one run. Prints a table and writes JSON.",
        epilog="example: scripts/bench_kernels --only attention --json kernels.json",
    )
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def median_seconds(fn: Callable[..., Any], sets: Sequence[tuple], group: int = GROUP) -> float:
    """Median over groups of `group` dispatches with one synchronisation each, over input sets in rotation."""
    for args in sets:
        jax.block_until_ready(fn(*args))
    times, at = [], 0
    for _ in range(GROUPS):
        start = time.perf_counter()
        for _ in range(group):
            out = fn(*sets[at % len(sets)])
            at += 1
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / group)
    return statistics.median(times)


def rotated(make: Callable[[int], tuple]) -> list[tuple]:
    """make(0), make(1), ... until CACHE_BYTES are held; two at least."""
    sets = [make(0)]
    size = sum(x.nbytes for x in jax.tree.leaves(sets[0]))
    return sets + [make(i) for i in range(1, max(math.ceil(CACHE_BYTES / size), 2))]


def compiled(fn: Callable[..., Any], args: tuple) -> Callable[..., Any]:
    return jax.jit(fn).lower(*args).compile()


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def normals(number: int, shape: tuple[int, ...]) -> tuple:
    """Three random bfloat16 arrays."""
    return tuple(normal(3 * number + i, shape, jnp.bfloat16) for i in range(3))


class Bench:
    def __init__(self, platform: Platform):
        self.platform, self.lines = platform, list[Line]()
        self.console = Console(width=120, highlight=False)
        squares = rotated(
            lambda i: (normal(2 * i, (8192, 8192), jnp.bfloat16), normal(2 * i + 1, (8192, 8192), jnp.bfloat16))
        )
        self.flops = 2 * 8192**3 / median_seconds(compiled(lambda a, b: a @ b, squares[0]), squares)
        block = rotated(lambda i: (normal(i, (1 << 28,), jnp.float32),))
        self.bytes = 2 * block[0][0].nbytes / median_seconds(compiled(lambda x: x + 1, block[0]), block)

    def add(
        self,
        work: str,
        what: str,
        sets: Sequence[tuple],
        fn: Callable[..., Any],
        amount: float,
        unit: str,
        group: int = GROUP,
    ) -> None:
        """Times fn over the input sets. A line that cannot run is reported and does not lose the others."""
        try:
            seconds = median_seconds(compiled(fn, sets[0]), sets, group)
        except Exception as error:
            self.console.print(f"{work}, {what}: {type(error).__name__}: {str(error)[:200]}")
            return
        self.put(work, what, seconds, amount, unit)

    def put(self, work: str, what: str, seconds: float, amount: float, unit: str) -> None:
        floor = amount / (self.flops if unit == "TFLOP/s" else self.bytes)
        line = Line(work, what, seconds, amount, unit, floor)
        self.lines.append(line)
        self.console.print(f"{work}, {what}: {1e3 * seconds:.3f} ms, {line.rate:.2f} {unit}")

    def attention(self) -> None:
        heads = 16
        for label, lengths, head_dim in (
            ("64 x 1024, head dim 72", [1024] * 64, 72),
            ("2 x 24332, head dim 72", [24332] * 2, 72),
            ("64 x 1024, head dim 64", [1024] * 64, 64),
            ("64 x 1024, head dim 80", [1024] * 64, 80),
            ("64 x 1024, head dim 128", [1024] * 64, 128),
        ):
            segments = segments_of(lengths)
            capacity = 64 * segments.first.shape[0]
            flop = 4.0 * sum(n * n for n in lengths) * head_dim * heads
            sets = rotated(partial(normals, shape=(capacity, heads, head_dim)))
            kernel = partial(attend_triton, segments=segments, platform=self.platform)
            self.add(f"attention, {label}", "kernel", sets, kernel, flop, "TFLOP/s")
            # The peer gets images of equal length as a batch: it needs no packing, and cannot pack.
            batch = (len(lengths), lengths[0], heads, head_dim)
            sets = rotated(partial(normals, shape=batch))
            if self.platform.kind == "cuda":
                peer = partial(jax.nn.dot_product_attention, implementation="cudnn")
                self.add(f"attention, {label}", "cuDNN, batched", sets, peer, flop, "TFLOP/s")

    def scores(self) -> None:
        heads, dim = 32, 128
        fp8 = jnp.float8_e4m3fnuz if self.platform.arch == "gfx942" else jnp.float8_e4m3fn
        for rows in (8192, 32768):
            flop = 2.0 * heads * dim * rows * (rows + 1) / 2
            for label, dtype in (("bfloat16", jnp.bfloat16), ("float8", fp8)):

                def make(i: int, rows: int = rows, dtype: Any = dtype) -> tuple:
                    scales = None if dtype == jnp.bfloat16 else jnp.abs(normal(4 * i + 3, (rows,), jnp.float32)) + 1
                    lengths = jnp.arange(1, rows + 1, dtype=jnp.int32)
                    q, gates = normal(4 * i, (rows, heads, dim), dtype), normal(4 * i + 1, (rows, heads), jnp.float32)
                    return q, gates, normal(4 * i + 2, (rows, dim), dtype), scales, jnp.zeros_like(lengths), lengths

                kernel = partial(row_scores_triton, platform=self.platform)
                name = f"scores, causal {rows}, {label}"
                self.add(name, "kernel", rotated(make), kernel, flop, "TFLOP/s", group=10)

    def selection(self) -> None:
        rows, keys, k = 1024, 131072, 2048
        ks, lengths = jnp.zeros(rows, jnp.int32), jnp.full(rows, keys, jnp.int32)
        amount = 4.0 * rows * keys
        for label, shape in (
            ("normal", lambda x: x),
            ("rounded to halves", lambda x: jnp.round(2 * x) / 2),
            ("three values", lambda x: jnp.clip(jnp.round(x), -1, 1)),
            ("mostly zero", lambda x: jnp.maximum(x - 2.5, 0)),
        ):
            name = f"top {k} of {rows} x {keys}, {label}"
            sets = rotated(lambda i, shape=shape: (shape(normal(i, (rows, keys), jnp.float32)),))
            kernel = partial(select_topk_triton, ks=ks, lengths=lengths, k=k, platform=self.platform)
            self.add(name, "kernel", sets, kernel, amount, "TB/s")
            if label == "normal":
                self.add(name, "lax.top_k", sets, partial(lax.top_k, k=k), amount, "TB/s", group=2)
            if find_spec("torch") is not None:
                self.put(name, "torch.topk", torch_topk_seconds([x for (x,) in sets], k), amount, "TB/s")

    def sparse(self) -> None:
        heads, width, value_dim, k, rows = 64, 576, 512, 2048, 4096
        attend = partial(sparse_mla, scale=width**-0.5, value_dim=value_dim)
        for slots in (32768, 131072):
            name = f"sparse attention, {rows} rows, {heads} heads, {k} of {slots} slots"
            flop = 2.0 * rows * heads * k * (width + value_dim)
            make = partial(sparse_inputs, rows=rows, heads=heads, width=width, requests=1, slots=slots, k=k)
            sets = rotated(make)
            self.add(name, "kernel", sets, partial(attend, platform=self.platform), flop, "TFLOP/s", group=5)
            float8 = [self.in_float8(arrays, value_dim) for arrays in sets]
            self.add(name, "kernel, float8", float8, partial(attend, platform=self.platform), flop, "TFLOP/s", group=5)
        self.add(name, "plain XLA", sets, partial(attend, platform=PLAIN), flop, "TFLOP/s", group=1)
        self.add(name, "plain XLA, float8", float8, partial(attend, platform=PLAIN), flop, "TFLOP/s", group=1)
        if find_spec("torch") is not None:
            self.put(name, "torch, gather and sdpa", torch_sparse_seconds(sets, value_dim), flop, "TFLOP/s")
        requests, keys = 64, 8192
        make = partial(sparse_inputs, rows=requests, heads=heads, width=width, requests=requests, slots=keys, k=k)
        sets, name = rotated(make), f"sparse decode, {requests} x {keys} keys, {heads} heads, {k} selected"
        amount = 2.0 * requests * k * width
        self.add(name, "kernel", sets, partial(attend, platform=self.platform), amount, "TB/s")
        self.add(name, "plain XLA", sets, partial(attend, platform=PLAIN), amount, "TB/s", group=4)
        if find_spec("torch") is not None:
            self.put(name, "torch, gather and sdpa", torch_sparse_seconds(sets, value_dim), amount, "TB/s")
        # A byte for a latent's number, four for its scale, two for a rotated one.
        amount = requests * k * (value_dim + 4 + 2.0 * (width - value_dim))
        float8 = [self.in_float8(arrays, value_dim) for arrays in sets]
        for what, platform, group in (("kernel, float8", self.platform, GROUP), ("plain XLA, float8", PLAIN, 4)):
            self.add(name, what, float8, partial(attend, platform=platform), amount, "TB/s", group=group)

    def in_float8(self, arrays: tuple, value_dim: int) -> tuple:
        """The same q, kv and indices with latents in the architecture's float8."""
        q, kv, indices = arrays
        values, scales = encode_latents(kv[:, :value_dim], KeyFormat.fp8(self.platform.arch))
        return q, LatentRows(values, scales, kv[:, value_dim:]), indices

    def paged(self) -> None:
        requests, keys, heads, kv_heads, dim, page = 64, 8192, 32, 8, 128, 64
        width = keys // page
        draw = np.random.default_rng(0)
        table = jnp.asarray(draw.permutation(requests * width).reshape(requests, width).astype(np.int32))
        cache = [normal(i, (requests * width, page, kv_heads, dim), jnp.bfloat16) for i in range(2)]
        own = jnp.arange(kv_heads, dtype=jnp.int32)
        kernel = partial(paged_attention_triton, scale=dim**-0.5, platform=self.platform)

        name = f"paged decode, {requests} x {keys} keys, {heads} heads on {kv_heads} of {dim}"
        rows = jnp.arange(requests, dtype=jnp.int32)
        # The keys alone are many times what the cache holds, so the same ones may be read again.
        sets = [(normal(i, (requests, heads, dim), jnp.bfloat16), *cache) for i in range(2)]
        full = jnp.full(requests, keys, jnp.int32)
        amount = 2.0 * requests * keys * kv_heads * dim * 2

        def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return kernel(q, k, v, full, rows, table, own)

        self.add(name, "kernel", sets, decode, amount, "TB/s")
        if self.platform.kind == "cuda":
            peer = partial(jax.nn.dot_product_attention, implementation="cudnn")
            shape = (requests, keys, kv_heads, dim)
            flat = [(q[:, None], *(x.reshape(shape) for x in cache)) for q, *_ in sets]
            self.add(name, "cuDNN, keys side by side", flat, peer, amount, "TB/s")

        count = 2048
        name = f"paged extend, the last {count} rows of {keys}"
        lengths = jnp.arange(keys - count, keys, dtype=jnp.int32) + 1
        tiles = jnp.zeros(count // ROW_TILE, jnp.int32)
        amount = 4.0 * (count * keys - count * (count - 1) / 2) * heads * dim

        def extend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return kernel(q, k, v, lengths, tiles, table, own)

        sets = [(normal(i, (count, heads, dim), jnp.bfloat16), *cache) for i in range(2)]
        self.add(name, "kernel", sets, extend, amount, "TFLOP/s")
        if self.platform.kind == "cuda":
            peer = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            shapes = [(1, keys, n, dim) for n in (heads, kv_heads, kv_heads)]
            sets = [tuple(normal(3 * i + j, s, jnp.bfloat16) for j, s in enumerate(shapes)) for i in range(2)]
            amount = 2.0 * keys * (keys + 1) * heads * dim
            self.add(name, f"cuDNN, all {keys} rows, causal", sets, peer, amount, "TFLOP/s")

    def delta(self, tokens: int = 8192, requests: int = 64, heads: int = 64, dim: int = 128) -> None:
        """The delta rule of a prompt, with a decay a key channel and with one a head, and a token of many requests."""
        chunks = -(-tokens // STATE_CHUNK)
        seats, fresh = jnp.zeros(chunks, jnp.int32), jnp.zeros(chunks, bool)
        for label, width, floor in (("a decay a channel", dim, -5.0), ("a decay a head", 1, None)):
            name = f"delta rule, {tokens} tokens, {heads} heads of {dim} x {dim}, {label}"
            # A state for each seat, though one is used: it would show if every chunk copied them all.
            sets = rotated(partial(delta_inputs, rows=tokens, states=requests, heads=heads, dim=dim, width=width))
            flop = 6.0 * tokens * heads * dim * dim

            def chunked(*args: jax.Array, floor: float | None = floor) -> tuple[jax.Array, jax.Array]:
                return delta_chunked(*args, seats, fresh, gate_floor=floor)

            def recurrent(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
                return delta_recurrent(*args[:-1], args[-1][0])

            self.add(name, "in chunks", sets, chunked, flop, "TFLOP/s", group=5)
            self.add(name, "token by token", sets, recurrent, flop, "TFLOP/s", group=1)
            (ours, state), (theirs, _) = (compiled(fn, sets[0])(*sets[0]) for fn in (chunked, recurrent))
            apart = float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())
            self.console.print(
                f"{name}: {apart:.1e} of the largest value apart; finite: {bool(jnp.isfinite(state).all())}"
            )
        name = f"delta rule, a token of {requests} requests, {heads} heads of {dim} x {dim}, a decay a channel"
        sets = rotated(partial(delta_inputs, rows=requests, states=requests, heads=heads, dim=dim, width=dim))
        self.add(name, "step", sets, delta_step, 2.0 * requests * heads * dim * dim * 4, "TB/s")

    def experts(self, here: int = 36, devices: int = 8, outputs: int = 2048, inputs: int = 4096) -> None:
        """One product of the experts that a device of 8 keeps of GLM-5.3-Flash, its eighth of the rows taken."""
        for tokens, group in ((64, GROUP), (8192, 5)):
            rows, taken = 8 * tokens, 8 * tokens // devices
            draw = np.random.default_rng(tokens)
            sizes = draw.multinomial(taken, draw.dirichlet(np.full(here, 4.0))).astype(np.int32)
            shapes = ((tokens, inputs), (here, outputs, inputs))
            which = jnp.asarray(draw.permutation(rows).astype(np.int32) // 8)
            sets = [
                (*(normal(2 * i + j, s, jnp.bfloat16) for j, s in enumerate(shapes)), jnp.asarray(sizes), which)
                for i in range(2)
            ]
            few = taken < 24 * here
            amount = 2.0 * (sizes > 0).sum() * outputs * inputs if few else 2.0 * taken * outputs * inputs
            name = f"experts, {tokens} tokens, {taken} of {rows} rows on {here} of {outputs} x {inputs}"
            for what, platform, count in (("kernel", self.platform, group), ("lax.ragged_dot", PLAIN, 2)):
                fn = partial(grouped_matmul, spread=devices * here, platform=platform)
                self.add(name, what, sets, fn, float(amount), "TB/s" if few else "TFLOP/s", group=count)
            if few:  # plain XLA may not have the memory for many
                both = (grouped_matmul(*sets[0], platform=p)[:taken] for p in (self.platform, PLAIN))
                ours, theirs = (np.asarray(y, np.float32) for y in both)
                apart = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
                self.console.print(f"{name}: {apart:.1e} of the largest value apart")

    def table(self) -> Table:
        table = Table(box=SIMPLE)
        for column in ("work", "what", "ms", "rate", "floor ms", "floor/time"):
            table.add_column(column, justify="left" if column in ("work", "what") else "right")
        for line in self.lines:
            table.add_row(
                line.work,
                line.what,
                f"{1e3 * line.seconds:.3f}",
                f"{line.rate:.{0 if line.unit == 'TFLOP/s' else 2}f} {line.unit}",
                f"{1e3 * line.floor:.3f}",
                f"{line.floor / line.seconds:.0%}",
            )
        return table


def segments_of(lengths: Sequence[int]) -> Segments[jax.Array]:
    """One lane that holds images of these lengths, one after another."""
    blocks = sum(align(n) for n in lengths) // 64
    first, end, start = np.arange(blocks, dtype=np.int32), np.zeros(blocks, np.int32), 0
    for length in lengths:
        own = slice(start // 64, (start + align(length)) // 64)
        first[own], end[own] = own.start, start + length
        start += align(length)
    return Segments(jnp.asarray(first), jnp.asarray(end))


def sparse_inputs(number: int, *, rows: int, heads: int, width: int, requests: int, slots: int, k: int) -> tuple:
    """q, kv and indices: each of `requests` requests has `slots` slots and as many of the rows; its rows select k of
    them, spread evenly at random, ascending."""
    q = normal(3 * number, (rows, heads, width), jnp.bfloat16)
    kv = normal(3 * number + 1, (requests * slots, width), jnp.bfloat16)
    place = jax.random.uniform(jax.random.key(3 * number + 2), (rows, k))
    chosen = ((jnp.arange(k) + place) * (slots / k)).astype(jnp.int32)
    request = jnp.arange(rows, dtype=jnp.int32) // (rows // requests)
    return q, kv, chosen + request[:, None] * slots


def delta_inputs(number: int, *, rows: int, states: int, heads: int, dim: int, width: int) -> tuple:
    """q, k, v, g, beta and states as a layer gives them: v in bfloat16, the rest in float32. g: in (-5, 0)."""
    made = [normal(6 * number + i, (rows, heads, dim), jnp.float32) for i in range(3)]
    g = -5 * jax.nn.sigmoid(2 * normal(6 * number + 3, (rows, heads, width), jnp.float32) - 4)
    beta = jax.nn.sigmoid(normal(6 * number + 4, (rows, heads), jnp.float32))
    state = normal(6 * number + 5, (states, heads, dim, dim), jnp.float32)
    return l2_normalise(made[0]) * dim**-0.5, l2_normalise(made[1]), made[2].astype(jnp.bfloat16), g, beta, state


def torch_sparse_seconds(sets: Sequence[tuple], value_dim: int, block: int = 256) -> float:
    """What PyTorch offers: the rows' keys are gathered, `block` rows at a time, and the heads attend to them."""
    import torch

    tensors = [tuple(torch.from_dlpack(x) for x in arrays) for arrays in sets]

    def attend(q: Any, kv: Any, indices: Any) -> None:
        for start in range(0, q.shape[0], block):
            keys = kv[indices[start : start + block]][:, None]
            torch.nn.functional.scaled_dot_product_attention(
                q[start : start + block, None], keys, keys[..., :value_dim], scale=q.shape[2] ** -0.5
            )

    for arrays in tensors:
        attend(*arrays)
    torch.cuda.synchronize()
    times = []
    for i in range(GROUPS):
        start = time.perf_counter()
        attend(*tensors[i % len(tensors)])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def torch_topk_seconds(arrays: Sequence[jax.Array], k: int) -> float:
    import torch

    tensors = [torch.from_dlpack(x) for x in arrays]
    for tensor in tensors:
        torch.topk(tensor, k, dim=1)
    torch.cuda.synchronize()
    times = []
    for _ in range(GROUPS):
        start = time.perf_counter()
        for i in range(6):
            torch.topk(tensors[i % len(tensors)], k, dim=1)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 6)
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    platform = platform_of(jax.devices()[0])
    if not platform.runs_kernels:
        print(f"error: the kernels need a GPU; this machine has {platform.kind} ({platform.name})", file=sys.stderr)
        return 1
    bench = Bench(platform)
    for part in options.only or PARTS:
        getattr(bench, part)()
    today = datetime.date.today().isoformat()
    bench.console.print(
        f"\n{platform.name} ({platform.kind}), jax {jax.__version__}, {today}. "
        f"Floor: {bench.flops / 1e12:.0f} TFLOP/s, {bench.bytes / 1e12:.2f} TB/s."
    )
    bench.console.print(bench.table())
    bench.console.print(EXPLAIN)
    if options.json:
        found = {
            "device": asdict(platform),
            "jax": jax.__version__,
            "date": today,
            "flops": bench.flops,
            "bytes": bench.bytes,
            "lines": [asdict(line) for line in bench.lines],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
