"""Attention in tiny lanes, in plain XLA: an image of at most 64 patches is one padded square of scores.

Images stand at multiples of 4 patches, so that next to nothing of the lane is padding. For attention alone each is
copied to rows of its own, from its first patch on; so its rows depend on nothing outside it and come out the same
wherever it lies in the lane:

    lane      | a a a a a | b b | c c c ...        copied   | a a a a a . . . |
                                                            | b b . . . . . . |
                                                            | c c c . . . . . |

A loop over the images that there are takes squares of 16, 40 or 64 patches, the least that holds an image, in turn.
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
    C, H, D = q.shape
    block = jnp.arange(segments.first.shape[0], dtype=jnp.int32)
    length = jnp.where(segments.first == block, segments.end - block * TINY_BLOCK, 0)

    def attend(start, end, side) -> Float[Array, "n side H D"]:
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
        out = jnp.einsum("nhqk,nkhd->nqhd", weights.astype(v.dtype), read(v), preferred_element_type=jnp.float32)
        total = jnp.moveaxis(weights.sum(-1), 1, -1)[..., None]
        # A row that saw no key has total 0 and must give 0, not NaN.
        return (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype)

    # What is found lies image by image, those of one square after those of another; `place`: where an image begins.
    found, place, least = [], jnp.zeros_like(block), 1
    for side in (ATTENTION_BLOCK,) if chunk is None else SQUARES:
        mine = (length >= least) & (length <= side)
        count = mine.sum(dtype=jnp.int32)
        places = C // room(least, TINY_BLOCK)  # of images as small as these
        group = min(places, places if chunk is None else chunk * ATTENTION_BLOCK // side)
        padded = -(-places // group) * group
        first = jnp.nonzero(mine, size=padded, fill_value=0)[0].astype(jnp.int32)
        start = first * TINY_BLOCK
        end = jnp.where(jnp.arange(padded) < count, segments.end[first], 0)
        before = sum(part.shape[0] for part in found)
        place = jnp.where(mine, before + (jnp.cumsum(mine) - 1) * side, place)
        if group == padded:
            part = attend(start, end, side)
        else:

            def step(i, part, start=start, end=end, side=side, group=group):
                begins, ends = (lax.dynamic_slice_in_dim(x, i * group, group) for x in (start, end))
                return lax.dynamic_update_slice_in_dim(part, attend(begins, ends, side), i * group, 0)

            empty = jnp.zeros((padded, side, H, D), q.dtype)
            part = lax.fori_loop(0, -(-count // group), step, empty)
        found.append(part.reshape(padded * side, H, D))
        least = side + 1
    first = jnp.repeat(segments.first, TINY_BLOCK, total_repeat_length=C)
    real = jnp.arange(C) < jnp.repeat(segments.end, TINY_BLOCK, total_repeat_length=C)
    row = jnp.where(real, place[first] + jnp.arange(C) - first * TINY_BLOCK, 0)
    picked = jnp.concatenate(found).at[row].get(mode="promise_in_bounds")
    return jnp.where(real[:, None, None], picked, 0)
