"""Sparse latent attention as one kernel: Pallas through Triton, the backend that reaches AMD as well as NVIDIA.

A program keeps one row's queries, a tile of up to 64 heads, and lets blocks of the row's selected keys stream by. A
block is gathered once: all heads score it, and its latent part is multiplied again as values.

    queries [heads, V | rest]   x   keys [block, V | rest]   ->  scores [heads, block]  ->  running softmax, base 2
                                    keys [block, V]          ->  sums   [heads, V]

float8 latents are widened to bfloat16 in registers, which is exact; their scales multiply the latent part of the
scores, and the weights before these multiply the values.

Where the rows are too few to fill a GPU, as in decoding, the selection is cut into parts, a program each, whose sums
are joined afterwards. Blocks past a row's last key are not read.
"""

import math
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from dsa_indexer.quant import KeyFormat
from dsa_indexer.sparse_mla.latents import LatentRows, widen, widened_by
from dsa_indexer.tiles import SparseTile, has_tiles, sparse_tile
from vitstripe.platform import Platform

LARGEST_VALUE_DIM, LARGEST_REST, LARGEST_K = 512, 128, 8192
_MOST_ELEMENTS = (1 << 31) - 1  # offsets have 32 bits
_SMALLEST = 16  # the least size of a matrix instruction's operand
_NO_SCORE = -1e30
"""The peak of a row that has seen no key: finite, so that it can be subtracted from itself."""


def _power_of_two(size: int) -> int:
    return max(1 << (size - 1).bit_length(), _SMALLEST)


def _kernel(
    q_ref: Any,
    kv: Any,
    indices_ref: Any,
    *out_refs: Any,
    tile: SparseTile,
    value_dim: int,
    scale: float,
    parts: int,
):
    """kv: a reference, or LatentRows of them. out_refs: the values, or with several parts their float32 sums, the peaks
    and the totals that go with them."""
    is_float8 = isinstance(kv, LatentRows)
    (_, num_heads, width), num_slots, dtype = q_ref.shape, (kv.values if is_float8 else kv).shape[0], q_ref.dtype
    num_indices = indices_ref.shape[1]
    groups = -(-num_heads // tile.heads)
    row, group = lax.div(pl.program_id(0), groups), lax.rem(pl.program_id(0), groups)
    part = pl.program_id(1)
    head = group * tile.heads + jnp.arange(tile.heads, dtype=jnp.int32)
    heads_fit = num_heads % tile.heads == 0
    # (first column, columns, columns rounded up) of what is multiplied at a time: the latent part, then the rest.
    pieces = []
    for start in range(0, value_dim, tile.columns):
        size = min(value_dim - start, tile.columns)
        pieces.append((start, size, _power_of_two(size)))
    num_values = len(pieces)
    if width > value_dim:
        pieces.append((value_dim, width - value_dim, _power_of_two(width - value_dim)))

    def columns(piece: tuple[int, int, int]) -> tuple[Array, Array | None]:
        start, size, rounded = piece
        column = jnp.arange(rounded, dtype=jnp.int32)
        return start + column, None if size == rounded else column < size

    def both(rows: Array | None, columns: Array | None, shape: tuple[int, ...]) -> Array | None:
        masks = [
            m
            for m in (None if rows is None else rows[:, None], None if columns is None else columns[None])
            if m is not None
        ]
        return jnp.broadcast_to(masks[0] if len(masks) == 1 else masks[0] & masks[1], shape) if masks else None

    heads_axis = 1 if tile.keys_first else 0

    def across(numbers: Array) -> Array:
        """One number a head, along the other axis."""
        return jnp.expand_dims(numbers, 1 - heads_axis)

    def load(ref: Any, mask: Array | None) -> Array:
        return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0.0)

    def is_key(slot: Array) -> Array:
        return (slot >= 0) & (slot < num_slots)

    queries = []
    for piece in pieces:
        column, inside = columns(piece)
        mask = both(None if heads_fit else head < num_heads, inside, (tile.heads, piece[2]))
        query = load(q_ref.at[row, head[:, None], column[None, :]], mask)
        # Turned here: within a branch it would be written to shared memory once a block.
        queries.append(query.T if tile.keys_first else query)

    # The row's blocks end with its last key.
    number = jnp.arange(_power_of_two(num_indices), dtype=jnp.int32)
    slot = plt.load(indices_ref.at[row, number], mask=number < num_indices, other=-1)
    last = lax.div(jnp.max(jnp.where(is_key(slot), number, -1)) + tile.keys, tile.keys)
    blocks = -(-num_indices // tile.keys)
    per_part = -(-blocks // parts)
    low = part * per_part
    high = jnp.minimum(last, low + per_part)
    lane = jnp.arange(tile.keys, dtype=jnp.int32)

    def slots(j: Array) -> Array:
        at = j * tile.keys + lane
        return plt.load(indices_ref.at[row, at], mask=at < num_indices, other=-1)

    def gather(slot: Array, piece: tuple[int, int, int]) -> Array:
        """Zeros where there is no key: what lies in slot 0, a NaN say, must not meet the weights."""
        column, inside = columns(piece)
        seen = is_key(slot)
        place, mask = jnp.where(seen, slot, 0)[:, None], both(seen, inside, (tile.keys, piece[2]))
        if not is_float8:
            return load(kv.at[place, column[None, :]], mask)
        if piece[0] == value_dim:
            return load(kv.rest.at[place, column[None, :] - value_dim], mask)
        # Masked when it is wide: the compiler then moves wide numbers to where the products take them. It would move
        # bytes, and widen them once for each product (367 registers on gfx942, not 228).
        column = column if inside is None else jnp.where(inside, column, 0)
        wide = widen(plt.load(kv.values.at[place, column[None, :]]))
        return wide if mask is None else jnp.where(mask, wide, 0)

    def scales_of(slot: Array) -> Array:
        """One number a key of the block, along the axis of keys."""
        seen = is_key(slot)
        found = plt.load(kv.scales.at[jnp.where(seen, slot, 0)], mask=seen, other=0.0)
        return jnp.expand_dims(found * widened_by(kv.values.dtype), heads_axis)

    def score(slot: Array, keys: list[Array], peak: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        """The block's weights, the new peak and total, and the factor for what was summed before."""
        products = [plt.dot(k, q) if tile.keys_first else plt.dot(q, k.T) for q, k in zip(queries, keys, strict=True)]
        latents, rest, scales = products, [], None
        if is_float8:
            latents, rest, scales = products[:num_values], products[num_values:], scales_of(slot)
        latent_scale = scale if scales is None else scale * scales
        # Scaled one by one, they are no chain of products either; where there is one anyway, they share their sums.
        latents = latents if tile.apart else [reduce(add, latents)]
        scores = reduce(add, [*(x * latent_scale for x in latents), *(x * scale for x in rest)])
        scores = jnp.where(jnp.expand_dims(is_key(slot), heads_axis), scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1 - heads_axis))
        weights = jnp.exp2(scores - across(new_peak))
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1 - heads_axis)
        weights = weights if scales is None else weights * scales
        return weights.astype(dtype), new_peak, total, shrink

    def weigh(weights: Array, value: Array) -> Array:
        return plt.dot(value.T, weights) if tile.keys_first else plt.dot(weights, value)

    def step(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        slot, peak, total, *sums = carry
        following = slots(j + 1)
        keys = [gather(slot, piece) for piece in pieces]

        def scored() -> tuple[Array, Array, Array, Array]:
            return score(slot, keys, peak, total)

        # The branch is always taken. Without it the compiler sees a chain of products.
        nothing = (zeros(tile.keys, dtype), peak, total, peak)
        weights, peak, total, shrink = lax.cond(j < last, scored, lambda: nothing) if tile.apart else scored()
        sums = [x * across(shrink) + weigh(weights, value) for x, value in zip(sums, keys[:num_values], strict=True)]
        return following, peak, total, *sums

    def zeros(columns: int, dtype: Any = jnp.float32) -> Array:
        return jnp.zeros((columns, tile.heads) if tile.keys_first else (tile.heads, columns), dtype)

    peak, total = jnp.full((tile.heads,), _NO_SCORE, jnp.float32), jnp.zeros((tile.heads,), jnp.float32)
    sums = [zeros(piece[2]) for piece in pieces[:num_values]]
    _, peak, total, *sums = lax.fori_loop(low, high, step, (slots(low), peak, total, *sums))
    own = None if heads_fit else head < num_heads
    # A row without keys has total 0 and must give 0, not NaN.
    factor = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
    for piece, acc in zip(pieces[:num_values], sums, strict=True):
        column, inside = columns(piece)
        if parts == 1:
            acc = (acc * across(factor)).astype(out_refs[0].dtype)
        acc = acc.T if tile.keys_first else acc
        at = (row, head[:, None], column[None, :])
        at = out_refs[0].at[at if parts == 1 else (part, *at)]
        plt.store(at, acc, mask=both(own, inside, acc.shape))
    if parts > 1:
        _, peaks_ref, totals_ref = out_refs
        plt.store(peaks_ref.at[part, row, head], peak, mask=own)
        plt.store(totals_ref.at[part, row, head], total, mask=own)


def _parts(rows: int, groups: int, blocks: int, tile: SparseTile) -> int:
    """Parts of a selection: as many as give `tile.programs` programs, each of at least `tile.least_blocks` blocks."""
    return max(min(tile.programs // (rows * groups), blocks // tile.least_blocks), 1)


def sparse_mla_triton(
    q: Float[Array, "T H C"],
    kv: Float[Array, "slots C"] | LatentRows,
    indices: Int32[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
    platform: Platform,
    tile: SparseTile | None = None,
    interpret: bool = False,
) -> Float[Array, "T H V"]:
    """`sparse_mla` for q and kv of one 16-bit dtype, and for bfloat16 q with float8 latents. Products are summed in
    float32; the softmax is float32, its weights rounded to q's dtype, times the latents' scales if they have any,
    before they multiply the values.

    platform: what it is compiled for; it chooses the tile unless `tile` is given. interpret: run as plain JAX
    operations, on any device. Raises ValueError for arrays that `takes` refuses.
    """
    num_rows, num_heads, _ = q.shape
    num_indices = indices.shape[1]
    if refusal := _refusal(q, kv, indices, value_dim):
        raise ValueError(f"the sparse attention kernel takes {refusal}; use plain XLA")
    is_float8 = isinstance(kv, LatentRows)
    if min(num_rows, num_heads, num_indices, (kv.values if is_float8 else kv).shape[0]) == 0:
        return jnp.zeros((num_rows, num_heads, value_dim), q.dtype)
    tile = sparse_tile(platform, heads=num_heads, is_float8=is_float8) if tile is None else tile
    groups, blocks = -(-num_heads // tile.heads), -(-num_indices // tile.keys)
    parts = _parts(num_rows, groups, blocks, tile)
    shape = (num_rows, num_heads, value_dim)
    if parts == 1:
        outputs = (jax.ShapeDtypeStruct(shape, q.dtype),)
    else:
        numbers = jax.ShapeDtypeStruct((parts, *shape[:2]), jnp.float32)
        outputs = (jax.ShapeDtypeStruct((parts, *shape), jnp.float32), numbers, numbers)
    scale *= math.log2(math.e)
    found = pl.pallas_call(
        partial(_kernel, tile=tile, value_dim=value_dim, scale=scale, parts=parts),
        grid=(num_rows * groups, parts),
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="sparse_mla",
    )(q, kv, indices)
    if parts == 1:
        return found[0]
    sums, peaks, totals = found
    weights = jnp.exp2(peaks - jnp.max(peaks, 0))
    total = jnp.sum(weights * totals, 0)
    values = jnp.sum(weights[..., None] * sums, 0)
    return (values / jnp.where(total == 0, 1, total)[..., None]).astype(q.dtype)


def _refusal(q: Array, kv: Array | LatentRows, indices: Array, value_dim: int) -> str | None:
    """What the kernel takes instead of these, in words; None if it takes them."""
    if isinstance(kv, LatentRows):
        if q.dtype != jnp.bfloat16:  # float16 does not hold weights that a scale has made small
            return f"float8 latents with bfloat16 q, not {q.dtype}"
    elif q.dtype != kv.dtype or kv.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q and kv of one 16-bit dtype, not {q.dtype} and {kv.dtype}"
    rest, k, largest = q.shape[2] - value_dim, indices.shape[1], max(x.size for x in jax.tree.leaves((q, kv)))
    if not 1 <= value_dim <= LARGEST_VALUE_DIM or not 0 <= rest <= LARGEST_REST:
        return f"up to {LARGEST_VALUE_DIM} columns of values and {LARGEST_REST} others, not {value_dim} and {rest}"
    if largest > _MOST_ELEMENTS:
        return f"arrays of up to {_MOST_ELEMENTS} elements, not {largest}"
    if k > LARGEST_K:
        return f"up to {LARGEST_K} indices a row, not {k}"
    return None


def takes(q: Array, kv: Array | LatentRows, indices: Array, value_dim: int, platform: Platform) -> bool:
    """Whether the kernel serves arrays of these dtypes and sizes on this platform."""
    if not platform.runs_kernels or _refusal(q, kv, indices, value_dim) is not None:
        return False
    # Which float8 an architecture converts is known only of those in the table.
    return not isinstance(kv, LatentRows) or (
        has_tiles(platform) and kv.values.dtype == KeyFormat.fp8(platform.arch).jax_dtype
    )
