"""Packed attention as one kernel: Pallas through Triton, the backend that reaches AMD as well as NVIDIA.

A program owns `queries` rows of one head and walks over the key blocks of their image, in order from the image's first,
with a running softmax in base 2. Nothing outside the image is read, and no [C, C] array exists:

    block (64 patches)   0   1   2 | 3   4   5   6 | 7         queries = 128
    image                a   a   a | b   b   b   b | padding
    program              0   -   2 | 3   -   5   - | 7         program 2 has one block of rows to write, 7 writes zeros

A tile begins at an even block *of its image* (for 128 rows), so it never holds two images, and an image's rows come out
the same wherever the image lies in the lane and whatever lies beside it. The programs between have nothing to do.

Head dimensions that are no power of two are cut into pieces that are (72 = 64 + 16). Pieces may overlap: the query's
columns that the first piece has already multiplied are zeroed in the second, so that keys need no mask.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from vitbatch.attention.blocks import NO_SCORE
from vitbatch.attention.tiles import AttentionTile, attention_tile, window_tile
from vitbatch.config import ATTENTION_BLOCK
from vitbatch.lanes import Segments
from vitstripe.exp2 import Exp2, exp2_for
from vitstripe.platform import Platform

_HIDDEN = -1e38
"""The score of a key that a row does not see. Scaled, it is still so far below NO_SCORE, the peak of a row that has
seen no key yet, that its weight is exactly 0."""
_SMALLEST_PIECE = 16  # the least contraction of a matrix instruction


def kernel_serves(q: Float[Array, "C H D"], platform: Platform) -> bool:
    """Whether the kernels run on this platform in q's dtype and head dimension."""
    head_dim = q.shape[2]
    return (
        platform.runs_kernels and q.dtype == jnp.bfloat16 and head_dim % 8 == 0 and _SMALLEST_PIECE <= head_dim <= 128
    )


def pieces_of(head_dim: int) -> tuple[tuple[int, int, int], ...]:
    """(start, width, overlap) of each piece of a head: widths are powers of two of at least 16, and the first `overlap`
    columns of a piece belong to the one before. Raises ValueError unless head_dim is a multiple of 8 from 16 to 128."""
    if head_dim % 8 or not _SMALLEST_PIECE <= head_dim <= 128:
        raise ValueError(
            f"head dimension {head_dim}: the attention kernel takes multiples of 8 from 16 to 128; use attend_blockwise"
        )
    pieces, start = [], 0
    while start < head_dim:
        left = head_dim - start
        width = max(1 << (left.bit_length() - 1), _SMALLEST_PIECE)
        overlap = max(width - left, 0)
        pieces.append((start - overlap, width, overlap))
        start += width - overlap
    return tuple(pieces)


def _kernel(
    first_ref: Any,
    end_ref: Any,
    *refs: Any,
    tile: AttentionTile,
    pieces: tuple[tuple[int, int, int], ...],
    scale: float,
    reach: int | None,
    exp2: Exp2,
):
    """reach: None for attention over the whole image; with windows, how many blocks a window may
    reach to either side, and the first of `refs` holds the window of each patch."""
    ids_ref, (q_ref, k_ref, v_ref, out_ref) = (refs[0], refs[1:]) if reach is not None else (None, refs)
    block, head = pl.program_id(0), pl.program_id(1)
    first, end = first_ref[block], end_ref[block]
    size = ATTENTION_BLOCK
    blocks = tile.queries // size
    value_head = head + v_ref.shape[1] - q_ref.shape[1]

    def work():
        row = block * size + jnp.arange(tile.queries, dtype=jnp.int32)
        image_end = jnp.maximum(end, 0)
        # Rows this tile writes: those of its image's blocks, or of its one block of padding.
        stop = jnp.maximum(-(-image_end // size), block + 1) * size
        owned = (row < stop)[:, None]
        queries = []
        for start, width, overlap in pieces:
            column = jnp.arange(width, dtype=jnp.int32)
            wanted = owned & (column >= overlap)[None, :] if overlap else jnp.broadcast_to(owned, (tile.queries, width))
            at = q_ref.at[pl.ds(block * size, tile.queries), head, pl.ds(start, width)]
            queries.append(plt.load(at, mask=wanted, other=0.0))
        own_ids = None
        if ids_ref is not None:
            at = ids_ref.at[pl.ds(block * size, tile.queries)]
            own_ids = plt.load(at, mask=row < stop, other=-1)

        def step(j, carry, base, masked):
            peak, total, accs = carry
            start = base * size + j * tile.keys
            column = start + jnp.arange(tile.keys, dtype=jnp.int32)
            inside = column < image_end

            def load(ref, piece, head=head):
                at = ref.at[pl.ds(start, tile.keys), head, pl.ds(piece[0], piece[1])]
                if not masked:
                    return plt.load(at)
                # Zeros for the patches past the image: whatever lies there, a NaN say, must not meet the weights.
                return plt.load(at, mask=jnp.broadcast_to(inside[:, None], (tile.keys, piece[1])), other=0.0)

            scores = jnp.zeros((tile.queries, tile.keys), jnp.float32)
            for query, piece in zip(queries, pieces, strict=True):
                scores += plt.dot(query, load(k_ref, piece).T)
            if ids_ref is not None and own_ids is not None:
                # Neither -1 nor the id of a window, so that rows and keys outside any image see nothing.
                ids = plt.load(ids_ref.at[pl.ds(start, tile.keys)], mask=inside, other=-2)
                scores = jnp.where(own_ids[:, None] == ids[None, :], scores, _HIDDEN)
            elif masked:
                scores = jnp.where(inside[None, :], scores, _HIDDEN)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * scale)
            weights = exp2(scores, scale, new_peak[:, None])
            shrink = jnp.exp2(peak - new_peak)
            total = total * shrink + jnp.sum(weights, axis=1)
            weights = weights.astype(v_ref.dtype)
            accs = tuple(
                acc * shrink[:, None] + plt.dot(weights, load(v_ref, piece, value_head))
                for acc, piece in zip(accs, pieces, strict=True)
            )
            return new_peak, total, accs

        carry = (
            jnp.full((tile.queries,), NO_SCORE, jnp.float32),
            jnp.zeros((tile.queries,), jnp.float32),
            tuple(jnp.zeros((tile.queries, width), jnp.float32) for _, width, _ in pieces),
        )
        if reach is None:
            keys = jnp.maximum(image_end - first * size, 0)
            whole = keys // tile.keys
            carry = lax.fori_loop(0, whole, partial(step, base=first, masked=False), carry)
            carry = lax.fori_loop(whole, -(-keys // tile.keys), partial(step, base=first, masked=True), carry)
        else:
            low = jnp.maximum(first, block - reach)
            high = jnp.minimum(-(-image_end // size), block + blocks + reach)
            trips = -(-jnp.maximum(high - low, 0) * size // tile.keys)
            carry = lax.fori_loop(0, trips, partial(step, base=low, masked=True), carry)
        _, total, accs = carry
        # A row that saw no key has total 0 and must give 0, not NaN; rows past the image's end give 0, too.
        factor = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
        real = (row < image_end)[:, None]
        for acc, (start, width, overlap) in zip(accs, pieces, strict=True):
            column = jnp.arange(width, dtype=jnp.int32)
            value = jnp.where(real, acc * factor[:, None], 0.0).astype(out_ref.dtype)
            at = out_ref.at[pl.ds(block * size, tile.queries), head, pl.ds(start, width)]
            plt.store(at, value, mask=owned & (column >= overlap)[None, :])

    if blocks == 1:
        work()
    else:
        pl.when(lax.rem(block - first, jnp.int32(blocks)) == 0)(work)


def _call(
    arrays: Sequence[Array],
    segments: Segments[Array],
    windows: Array | None,
    window_patches: int | None,
    platform: Platform,
    tile: AttentionTile | None,
    interpret: bool,
) -> Array:
    q = arrays[0]
    capacity, heads, head_dim = q.shape
    blocks = segments.first.shape[0]
    if blocks * ATTENTION_BLOCK != capacity:
        raise ValueError(
            f"a lane of {capacity} patches in {blocks} blocks; the kernel's have {ATTENTION_BLOCK} patches"
        )
    reach = None if window_patches is None else -(-(window_patches - 1) // ATTENTION_BLOCK)
    pieces = pieces_of(head_dim)
    if tile is None:
        tile = attention_tile(platform, head_dim, capacity * heads) if reach is None else window_tile(platform)
    kernel = partial(
        _kernel,
        tile=tile,
        pieces=pieces,
        scale=head_dim**-0.5 * math.log2(math.e),
        reach=reach,
        exp2=exp2_for(platform, interpret=interpret),
    )
    return pl.pallas_call(
        kernel,
        grid=(blocks, heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="packed_attention" if reach is None else "window_attention",
    )(segments.first, segments.end, *(() if windows is None else (windows,)), *arrays)


def attend_triton(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C G D"],
    segments: Segments[Array],
    *,
    platform: Platform,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> Float[Array, "C H D"]:
    """softmax(q k^T / sqrt(D)) v within each image of a lane, in q's dtype; rows outside any image are 0. v: the values
    are its last H heads.

    Matrix products in the arrays' dtype with float32 accumulation, softmax in float32, its weights rounded to v's dtype
    before they multiply v. platform: what it is compiled for; it chooses the tile unless `tile` is given. interpret:
    run as plain JAX operations, on any device.

    Raises ValueError for blocks that are not 64 patches, and for a head dimension that is no multiple of 8
    from 16 to 128.
    """
    return _call((q, k, v), segments, None, None, platform, tile, interpret)


def attend_windows_triton(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C G D"],
    segments: Segments[Array],
    windows: Int[Array, "C"],
    *,
    window_patches: int,
    platform: Platform,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> Float[Array, "C H D"]:
    """Like `attend_triton`, within each window of an image. windows: an id a patch, -1 outside any image. The patches
    of a window stand side by side, `window_patches` of them at most, so that a row's window ends at most
    ceil((window_patches - 1) / block) blocks away."""
    return _call((q, k, v), segments, windows, window_patches, platform, tile, interpret)
