"""Attention in tiny lanes, in plain XLA: an image of at most 64 patches is one padded square of scores.

Images stand at multiples of 4 patches, so that next to nothing of the lane is padding. For attention alone each is
copied to rows of its own, from its first patch on; so its rows depend on nothing outside it and come out the same
wherever it lies in the lane:

    lane      | a a a a a | b b | c c c ...        copied   | a a a a a . . . |
                                                            | b b . . . . . . |
                                                            | c c c . . . . . |

A loop over the images that there are takes squares of 16, 40 or 64 patches, the least that holds an image, in turn, and
writes each image's rows back to where it lies.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vitbatch.attention.blocks import NO_SCORE
from vitbatch.config import ATTENTION_BLOCK, TINY_BLOCK, room
from vitbatch.lanes import Segments

# An image of 16 patches costs a sixteenth in a square of 16; each square more is one more loop to compile.
SQUARES = (16, 40, ATTENTION_BLOCK)


def attend_tiny(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C H D"],
    segments: Segments[Array],
    windows: Int[Array, "C"] | None = None,
    *,
    chunk: int | None,
) -> Float[Array, "C H D"]:
    """Attention within each image of a tiny lane, or within each of its windows, in q's dtype; softmax and accumulation
    in float32; rows outside any image are 0.

    windows: an id a patch, or None. chunk: images of 64 patches computed at a time (of smaller ones as many as have as
    many rows), and then no more than there are; None for squares of 64 for all places at once, without a loop.
    """
    C, _, D = q.shape
    block = jnp.arange(segments.first.shape[0], dtype=jnp.int32)
    length = jnp.where(segments.first == block, segments.end - block * TINY_BLOCK, 0)

    def attend(out, start, end, side) -> Float[Array, "C H D"]:
        """`out` with the rows of the images from `start` to `end`."""
        offset = start[:, None] + jnp.arange(side, dtype=jnp.int32)
        rows, inside = jnp.minimum(offset, C - 1), offset < end[:, None]

        def read(x):
            # Zeros past the image: whatever lies there, a NaN say, must not meet the weights.
            return jnp.where(inside[..., None, None], x.at[rows].get(mode="promise_in_bounds"), 0)

        seen = inside[:, None, None, :]
        if windows is not None:
            ids = windows.at[rows].get(mode="promise_in_bounds")
            seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
        scores = jnp.einsum("nqhd,nkhd->nhqk", read(q), read(k), preferred_element_type=jnp.float32) * D**-0.5
        peak = jnp.where(seen, scores, NO_SCORE).max(-1, keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - peak), 0.0)
        moved = jnp.einsum("nhqk,nkhd->nqhd", weights.astype(v.dtype), read(v), preferred_element_type=jnp.float32)
        total = jnp.moveaxis(weights.sum(-1), 1, -1)[..., None]
        # A row that saw no key has total 0 and must give 0, not NaN.
        got = (moved / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
        # Rows past an image are dropped, each with an index of its own: unique ones need no order.
        dropped = C + jnp.arange(offset.size, dtype=jnp.int32).reshape(offset.shape)
        return out.at[jnp.where(inside, offset, dropped)].set(got, mode="drop", unique_indices=True)

    out, least = jnp.zeros_like(q), 1
    for side in (ATTENTION_BLOCK,) if chunk is None else SQUARES:
        mine = (length >= least) & (length <= side)
        count = mine.sum(dtype=jnp.int32)
        places = C // room(least, TINY_BLOCK)  # of images as small as these
        group = min(places, places if chunk is None else chunk * ATTENTION_BLOCK // side)
        padded = -(-places // group) * group
        first = jnp.nonzero(mine, size=padded, fill_value=0)[0].astype(jnp.int32)
        start = first * TINY_BLOCK
        end = jnp.where(jnp.arange(padded) < count, segments.end[first], 0)
        if group == padded:
            out = attend(out, start, end, side)
        else:

            def step(i, out, start=start, end=end, side=side, group=group):
                begins, ends = (lax.dynamic_slice_in_dim(x, i * group, group) for x in (start, end))
                return attend(out, begins, ends, side)

            out = lax.fori_loop(0, -(-count // group), step, out)
        least = side + 1
    return out
