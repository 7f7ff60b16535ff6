"""Index scores of one row tile in plain XLA.

Everything is computed in one fixed shape: a tile of 8 rows against a block of 512 keys that starts at a multiple of
512. So the bits of a score depend on its row and its key alone, not on how many rows or keys there are, on the tile's
other rows, or on the device. Stripes, chunks and decode steps agree with each other because of it.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

ROW_TILE = 8
KEY_BLOCK = 512

Block = tuple[Float[Array, "block D"], Float32[Array, "block"] | None]


def columns_of(num_keys: int) -> int:
    """num_keys rounded up to whole key blocks: the width of a tile's scores."""
    return -(-num_keys // KEY_BLOCK) * KEY_BLOCK


def _operands(q: Array, keys: Array) -> tuple[Array, Array]:
    """Both in one dtype that every platform can multiply. Every float8 value is a bfloat16 value, so this is exact."""
    q, keys = (x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 else x for x in (q, keys))
    dtype = jnp.promote_types(q.dtype, keys.dtype)
    return q.astype(dtype), keys.astype(dtype)


def block_scores(
    q: Float[Array, "8 H D"], gates: Float32[Array, "8 H"], keys: Float[Array, "B D"]
) -> Float32[Array, "8 B"]:
    """sum_h gates[m, h] * relu(q[m, h] . keys[n]), float32 accumulation. q and keys of any float dtype, float8 too."""
    rows, heads, dim = q.shape
    q, keys = _operands(q, keys)
    # The barriers keep this computation apart from its surroundings: fused with a gather of the keys, say, the
    # compiler may contract multiplications and additions in another way, and the last bit differs.
    q, gates, keys = lax.optimization_barrier((q, gates, keys))
    dots = lax.dot_general(
        q.reshape(rows * heads, dim),
        keys,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    ).reshape(rows, heads, -1)
    # Not a maximum: that of a CPU gives max(NaN, 0) = 0, and a key that is NaN would pass for one that scores 0.
    return lax.optimization_barrier((jnp.where(dots <= 0, 0, dots) * gates[:, :, None]).sum(1))


def tile_scores(
    q: Float[Array, "8 H D"],
    gates: Float32[Array, "8 H"],
    ks: Int32[Array, "8"],
    lengths: Int32[Array, "8"],
    load_block: Callable[[Int32[Array, ""]], Block],
    columns: int,
) -> Float32[Array, "8 columns"]:
    """Scores of a tile in absolute columns. load_block(j) gives the keys [512 j, 512 (j + 1)) and their scales.

    Only the blocks between the tile's first and last visible key are computed. Every other column, and every column
    outside a row's own window, is not a score: mask it.
    """
    seen = lengths > 0
    first = jnp.min(jnp.where(seen, ks, columns)) // KEY_BLOCK
    last = -(-jnp.max(jnp.where(seen, ks + lengths, 0)) // KEY_BLOCK)

    def score(j: Int32[Array, ""], scores: Float32[Array, "8 columns"]) -> Float32[Array, "8 columns"]:
        keys, scales = load_block(j)
        block = block_scores(q, gates, keys)
        block = block if scales is None else block * scales
        return lax.dynamic_update_slice_in_dim(scores, block, j * KEY_BLOCK, axis=1)

    # zeros_like, so that under shard_map the loop's carry varies over the same mesh axes as the rows.
    empty = jnp.zeros_like(q, shape=(q.shape[0], columns), dtype=jnp.float32)
    return lax.fori_loop(first, last, score, empty)
