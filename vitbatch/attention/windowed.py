"""Attention within windows, in plain XLA, over a lane whose images stand window by window.

A window of W patches that meets a block of 64 reaches at most ceil((W - 1) / 64) blocks to either side, ragged or not.
So each query block reads a fixed number of key blocks around it and masks the patches of other windows:

    patch     0        64       128
    windows   | a   | b    | c | d  |        W <= 64: block 1 reads blocks 0, 1 and 2
    block     | 0      | 1      | 2

A block beyond the query block's own image is replaced by the query block itself, fully masked, which changes nothing to
the last bit and keeps whatever a neighbour computed out. Images start at whole blocks, so their windows meet the blocks
alike wherever they lie.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vitbatch.attention.blocks import NO_SCORE, block_size, from_blocks, to_blocks, to_chunks
from vitbatch.lanes import Segments


def attend_windowed(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C H D"],
    segments: Segments[Array],
    windows: Int[Array, "C"],
    *,
    window_patches: int,
    chunk: int,
) -> Float[Array, "C H D"]:
    """Attention within each window, in q's dtype; softmax and accumulation in float32."""
    C, H, D = q.shape
    B = segments.first.shape[0]
    size = block_size(C, B)
    chunk = min(chunk, B)
    reach = -(-(window_patches - 1) // size)
    around = jnp.arange(-reach, reach + 1, dtype=jnp.int32)
    keys, values, ids = to_blocks(k, size), to_blocks(v, size), windows.reshape(B, size)
    scale = D**-0.5

    def one_chunk(args):
        queries, own_ids, block, first, end = args
        wanted = block[:, None] + around
        inside = (wanted >= first[:, None]) & (wanted * size < end[:, None])
        read = jnp.where(inside, wanted, block[:, None])

        def gather(blocks):
            """[chunk, H, keys, D]: the blocks read, one after the other."""
            found = blocks.at[read].get(mode="promise_in_bounds")
            return found.transpose(0, 2, 1, 3, 4).reshape(read.shape[0], H, -1, D)

        near_ids = jnp.where(inside[..., None], ids.at[read].get(mode="promise_in_bounds"), -1)
        near_ids = near_ids.reshape(read.shape[0], 1, -1)
        seen = ((own_ids[:, :, None] == near_ids) & (near_ids >= 0))[:, None]
        scores = jnp.einsum("chqd,chkd->chqk", queries, gather(keys), preferred_element_type=jnp.float32) * scale
        peak = jnp.where(seen, scores, NO_SCORE).max(-1, keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - peak), 0.0)
        value = gather(values)
        out = jnp.einsum("chqk,chkd->chqd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        total = weights.sum(-1, keepdims=True)
        # A row that saw no key has total 0 and must give 0, not NaN.
        return (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype)

    per_block = (to_blocks(q, size), ids, jnp.arange(B, dtype=jnp.int32), segments.first, segments.end)
    out = lax.map(one_chunk, tuple(to_chunks(x, chunk) for x in per_block))
    return from_blocks(out.reshape(-1, H, size, D)[:B])
