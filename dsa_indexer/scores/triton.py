"""Index scores as one kernel: Pallas through Triton, the backend that reaches AMD as well as NVIDIA.

A program keeps a few rows' queries, all heads of them side by side, and lets key blocks stream by:

                        row 0: head 0 .. H-1 | row 1: head 0 .. H-1 | ...
    64 keys   [64, D] x [D, columns]  ->  relu, times gates, summed over each row's heads  ->  [64, rows]

Keys are the first operand, so that the heads of a row lie side by side in a thread's registers and the sum over them
hardly leaves the thread. Products accumulate in float32 over the whole head dimension; the sum over heads has a fixed
order. A score's bits depend on its row and its key alone: not on its row's tile, on the launch, or on where keys lie.

Key blocks outside the windows of all rows of a tile are neither read nor written: what stands there is whatever memory
held. The selection reads the columns of a row's own window alone.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from dsa_indexer.quant import KeyFormat
from dsa_indexer.tiles import ScoreTile, has_tiles, score_tile
from vitstripe.platform import Platform

_PROGRAMS, _SHORTEST_RUN = 1024, 8
_CONTRACTED_HEADS = (8, 16, 32, 64)  # 8 lie side by side in the threads of a Hopper product; registers suffice for 64
_MOST_ELEMENTS = (1 << 31) - 1  # offsets have 32 bits
_SMALLEST_DIM, _LARGEST_DIM = 16, 128  # the least contraction of a matrix instruction; the most that was measured


def _is_float8(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize == 1


def _multiplied_as(dtype: Any, platform: Platform) -> Any:
    """The dtype of the matrix products. Hopper's float8 units accumulate in fewer bits, and the way around it is slower
    than float16, which holds every float8_e4m3fn exactly; so are the products' sums, in float32."""
    return jnp.float16 if _is_float8(dtype) and platform.kind == "cuda" else dtype


def _gated(block: Array, gates: Array) -> Array:
    return jnp.maximum(block, 0.0) * gates[None, :]


def _gated_contracted(block: Array, gates: Array, *, heads: int) -> Array:
    """The same with products and sums contracted, which the compiler does not do: two instructions a score, not three.

    A thread holds a Hopper product in groups of heads / 2 numbers: heads 2 t, 2 t + 1, 2 t + 8, 2 t + 9, ... of one row
    for key r and, in between, for key r + 8. It adds them up in that order; what is not a sum is negative zero, and the
    compiler drops its additions. A compiler that lays products out in another way would not say so: the GPU tests tell,
    and `dsa_indexer.check_kernels`, which a server runs when it starts.
    """
    size = heads // 2
    lines = []
    for total, key in (("a", 0), ("b", 2)):
        for n, i in enumerate(4 * j + key + e for j in range(size // 4) for e in (0, 1)):
            product = f"r, ${2 * size + i}"
            lines.append(f"max.f32 r, ${size + i}, 0f00000000;")
            lines.append(f"fma.rn.f32 {total}, {product}, {total};" if n else f"mul.rn.f32 {total}, {product};")
    [sums] = plt.elementwise_inline_asm(
        f"{{ .reg .f32 r, a, b; {' '.join(lines)} mov.f32 $0, a; mov.f32 $2, b; }}",
        args=[block, jnp.broadcast_to(gates[None, :], block.shape)],
        constraints=",".join(["=&f"] * size + ["f"] * (2 * size)),
        pack=size,
        result_shape_dtypes=[jax.ShapeDtypeStruct(block.shape, jnp.float32)],
    )
    head = jnp.arange(block.shape[1], dtype=jnp.int32) & (heads - 1)
    is_sum = jnp.broadcast_to(((head & ~6) == 0)[None, :], block.shape)
    return jnp.where(is_sum, sums, jnp.float32(-0.0))


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    tile: ScoreTile,
    heads: int,
    num_keys: int,
    page_size: int,
    request_tiles: int,
    dtype: Any,
    gated: Callable[[Array, Array], Array],
):
    """names: which of q, gates, ks, lengths, keys, scales, pages and out are among `refs`. request_tiles: row tiles of
    a request; its pages follow those of the request before it. gated: a block [keys, columns], gates [columns] ->
    numbers whose sum over a row's heads is the score."""
    ref = dict(zip(names, refs, strict=True))
    rows = tile.columns // heads
    # Last tiles first: in a causal batch they see the most keys, and the short ones fill the gaps at the end.
    tile_number, start = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1) * tile.run
    request = lax.div(tile_number, request_tiles)
    row = lax.rem(tile_number, request_tiles) * rows + jnp.arange(rows, dtype=jnp.int32)
    ks = ref["ks"][pl.ds(tile_number * rows, rows)]
    lengths = ref["lengths"][pl.ds(tile_number * rows, rows)]
    first = jnp.min(jnp.where(lengths > 0, ks, num_keys)) // tile.keys
    last = (jnp.max(jnp.where(lengths > 0, ks + lengths, 0)) + tile.keys - 1) // tile.keys

    def work():
        q = ref["q"][pl.ds(tile_number * tile.columns, tile.columns), :].astype(dtype)
        gates = ref["gates"][pl.ds(tile_number * tile.columns, tile.columns)]
        lane = jnp.arange(tile.keys, dtype=jnp.int32)
        whole, num_pages = num_keys % tile.keys == 0, ref["keys"].shape[0] // page_size
        num_rows = ref["out"].shape[1]

        side_by_side = whole and "pages" not in ref
        first_page = request * (num_keys // page_size)

        def slots(j):
            """Where the keys of block j lie, one by one. Past the last key, the last key again."""
            column = jnp.minimum(j * tile.keys + lane, num_keys - 1)
            if "pages" not in ref:
                return column
            # A table's entries past the request's last page may hold anything; no row's window reaches them.
            page = jnp.clip(plt.load(ref["pages"].at[first_page + column // page_size]), 0, num_pages - 1)
            return page * page_size + column % page_size

        def dots(j):
            if side_by_side:
                at = ref["keys"].at[pl.ds(j * tile.keys, tile.keys), :]
            else:
                at = ref["keys"].at[slots(j)[:, None], jnp.arange(q.shape[1], dtype=jnp.int32)[None, :]]
            return plt.dot(plt.load(at).astype(dtype), q.T)

        def finish(j, block):
            scores = gated(block, gates)
            scores = jnp.sum(scores.reshape(tile.keys, rows, heads), axis=2)
            if "scales" in ref:
                at = pl.ds(j * tile.keys, tile.keys) if side_by_side else slots(j)
                scores = scores * plt.load(ref["scales"].at[at])[:, None]
            column = (j * tile.keys + lane)[:, None]
            # Rows that only fill up a request's last tile, and columns past the last key, lie outside the result.
            mask = None
            if not whole or num_rows % rows:
                mask = jnp.broadcast_to((column < num_keys) & (row < num_rows)[None, :], scores.shape)
            plt.store(ref["out"].at[request, row[None, :], column], scores, mask=mask)

        low, high = jnp.maximum(first, start), jnp.minimum(last, start + tile.run)

        def ahead(j, block):
            following = dots(j + 1)  # under way while this block is summed
            finish(j, block)
            return following

        def alone(j, carry):
            finish(j, dots(j))
            return carry

        if tile.ahead:
            finish(high - 1, lax.fori_loop(low, high - 1, ahead, dots(low)))
        else:
            lax.fori_loop(low, high, alone, jnp.int32(0))

    pl.when((first < start + tile.run) & (last > start))(work)


def _call(
    q: Array,
    gates: Array,
    ks: Array,
    lengths: Array,
    keys: Array,
    scales: Array | None,
    pages: Array | None,
    page_size: int,
    platform: Platform,
    tile: ScoreTile | None,
    interpret: bool,
) -> Array:
    """q [B, n, H, D] and gates, ks, lengths alike: n rows of each of B requests. pages [B, maxpages], or None and B = 1
    with contiguous keys. Scores [B, n, N]."""
    requests, num_rows, heads, dim = q.shape
    num_keys = keys.shape[0] if pages is None else pages.shape[1] * page_size
    if tile is None:
        tile = score_tile(platform, is_float8=_is_float8(keys.dtype))
    if heads & (heads - 1) or tile.columns % heads:
        raise ValueError(f"{heads} index heads: the kernel takes powers of two up to {tile.columns}")
    if dim & (dim - 1) or dim < _SMALLEST_DIM:
        raise ValueError(f"index head dimension {dim}: the kernel takes powers of two of at least {_SMALLEST_DIM}")
    rows = tile.columns // heads
    padded = -(-num_rows // rows) * rows
    # Enough programs to fill a GPU, where there are that many blocks. Blocks do not depend on each other, so a score's
    # bits do not depend on this.
    blocks = -(-num_keys // tile.keys)
    tiles = requests * padded // rows
    tile = replace(tile, run=min(tile.run, max(_SHORTEST_RUN, tiles * blocks // _PROGRAMS)))
    q, gates, ks, lengths = (
        jnp.pad(x, [(0, 0), (0, padded - num_rows)] + [(0, 0)] * (x.ndim - 2)) for x in (q, gates, ks, lengths)
    )
    operands = {
        "q": q.reshape(-1, dim),
        "gates": gates.reshape(-1),
        "ks": ks.reshape(-1),
        "lengths": lengths.reshape(-1),
        "keys": keys,
        "scales": scales,
        "pages": None if pages is None else pages.reshape(-1),
    }
    operands = {name: x for name, x in operands.items() if x is not None}
    contracted = tile.contracted and not interpret and platform.arch == "sm90" and heads in _CONTRACTED_HEADS
    kernel = partial(
        _kernel,
        names=(*operands, "out"),
        tile=tile,
        heads=heads,
        num_keys=num_keys,
        page_size=page_size,
        request_tiles=padded // rows,
        dtype=_multiplied_as(keys.dtype, platform),
        gated=partial(_gated_contracted, heads=heads) if contracted else _gated,
    )
    return pl.pallas_call(
        kernel,
        grid=(tiles, -(-blocks // tile.run)),
        out_shape=jax.ShapeDtypeStruct((requests, num_rows, num_keys), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="index_scores",
    )(*operands.values())


def takes(q: Array, keys: Array, platform: Platform) -> bool:
    """Whether the kernel scores queries and keys [..., D] of these dtypes and sizes on this platform."""
    if not platform.runs_kernels:
        return False
    heads, dim = q.shape[-2:]
    # Which float8 an architecture multiplies is known only of those in the table.
    allowed = [jnp.bfloat16, *([KeyFormat.fp8(platform.arch).jax_dtype] if has_tiles(platform) else [])]
    columns = score_tile(platform, is_float8=_is_float8(keys.dtype)).columns
    return (
        q.dtype == keys.dtype
        and keys.dtype in allowed
        and not heads & (heads - 1)
        and heads <= columns
        and not dim & (dim - 1)
        and _SMALLEST_DIM <= dim <= _LARGEST_DIM
        and max(q.size, keys.size) <= _MOST_ELEMENTS
    )


def row_scores_triton(
    q: Float[Array, "M H D"],
    gates: Float32[Array, "M H"],
    keys: Float[Array, "N D"],
    key_scales: Float32[Array, "N"] | None,
    ks: Int32[Array, "M"],
    lengths: Int32[Array, "M"],
    *,
    platform: Platform,
    tile: ScoreTile | None = None,
    interpret: bool = False,
) -> Float32[Array, "M N"]:
    """Scores of M rows against N contiguous keys; q and keys bfloat16 or the architecture's float8.

    Columns outside a row's window hold anything. platform: what it is compiled for; it chooses the tile unless `tile`
    is given. interpret: run as plain JAX operations, on any device. Raises ValueError unless H and D are powers of two
    that fit the tile.
    """
    q, gates, ks, lengths = (x[None] for x in (q, gates, ks, lengths))
    return _call(q, gates, ks, lengths, keys, key_scales, None, 1, platform, tile, interpret)[0]


def paged_scores_triton(
    q: Float[Array, "B n H D"],
    gates: Float32[Array, "B n H"],
    key_pages: Float[Array, "P page D"],
    scale_pages: Float32[Array, "P page"] | None,
    page_table: Int32[Array, "B maxpages"],
    lengths: Int32[Array, "B n"],
    *,
    platform: Platform,
    tile: ScoreTile | None = None,
    interpret: bool = False,
) -> Float32[Array, "B n N"]:
    """Scores of n rows a request against that request's paged keys, N = maxpages * page: the bits `row_scores_triton`
    gives for the same keys laid out contiguously. Row i of request b sees the first lengths[b, i] of them; the columns
    after those hold anything, and so may the entries of page_table after those."""
    num_pages, page_size, dim = key_pages.shape
    keys = key_pages.reshape(num_pages * page_size, dim)
    scales = None if scale_pages is None else scale_pages.reshape(-1)
    ks = jnp.zeros_like(lengths)
    return _call(q, gates, ks, lengths, keys, scales, page_table, page_size, platform, tile, interpret)
