"""Blockwise attention in plain XLA: the fallback every platform can run.

No [C, C] array exists. Query blocks are taken `chunk` at a time; the blocks of a chunk walk together over their own
images' key blocks, in order from each image's first, with a running softmax (Milakov and Gimelshein, 2018). The walk
ends with the chunk's longest image. A block whose image ended sooner reads its own first block again, fully masked,
which changes nothing to the last bit. So an image's rows depend on nothing outside it, neither on its neighbours nor on
its place in the lane. Lanes hold long images first, which keeps the images of a chunk alike: the extra work of a lane
is at most one chunk of its longest image.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vitbatch.attention.blocks import NO_SCORE, block_size, from_blocks, to_blocks, to_chunks
from vitbatch.lanes import Segments


def attend_blockwise(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C H D"],
    segments: Segments[Array],
    *,
    chunk: int,
) -> Float[Array, "C H D"]:
    """Attention within each image of a lane, in q's dtype; softmax and accumulation in float32."""
    C, H, D = q.shape
    B = segments.first.shape[0]
    size = block_size(C, B)
    chunk = min(chunk, B)
    keys, values = to_blocks(k, size), to_blocks(v, size)
    column = jnp.arange(size, dtype=jnp.int32)
    scale = D**-0.5

    def one_chunk(args):
        queries, first, end = args
        trips = jnp.maximum(end - first * size + size - 1, 0) // size

        def step(j, carry):
            peak, total, acc = carry
            block = jnp.where(j < trips, first + j, first)
            key = keys.at[block].get(mode="promise_in_bounds")
            value = values.at[block].get(mode="promise_in_bounds")
            seen = ((first + j) * size)[:, None] + column < end[:, None]
            seen = seen[:, None, None, :]
            scores = jnp.einsum("chqd,chkd->chqk", queries, key, preferred_element_type=jnp.float32) * scale
            new_peak = jnp.maximum(peak, jnp.where(seen, scores, NO_SCORE).max(-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_peak), 0.0)
            shrink = jnp.exp(peak - new_peak)
            moved = jnp.einsum(
                "chqk,chkd->chqd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
            )
            return new_peak, total * shrink + weights.sum(-1, keepdims=True), acc * shrink + moved

        rows = (chunk, H, size)
        start = (
            jnp.full((*rows, 1), NO_SCORE, jnp.float32),
            jnp.zeros((*rows, 1), jnp.float32),
            jnp.zeros((*rows, D), jnp.float32),
        )
        _, total, acc = lax.fori_loop(0, trips.max(), step, start)
        # A row that saw no key has total 0 and must give 0, not NaN.
        return (acc / jnp.where(total > 0, total, 1.0)).astype(q.dtype)

    per_block = (to_blocks(q, size), segments.first, segments.end)
    out = lax.map(one_chunk, tuple(to_chunks(x, chunk) for x in per_block))
    return from_blocks(out.reshape(-1, H, size, D)[:B])
