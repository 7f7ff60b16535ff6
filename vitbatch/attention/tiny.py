"""Attention in tiny lanes, in plain XLA: an image of at most 64 patches is one padded square of scores.

Images stand at multiples of 4 patches, so that next to nothing of the lane is padding. For attention alone each is
copied to 64 rows of its own, from its first patch on; so its rows depend on nothing outside it and come out the same
wherever it lies in the lane:

    lane      | a a a a a | b b | c c c ...        copied   | a a a a a . . . |
                                                            | b b . . . . . . |
                                                            | c c c . . . . . |

The planner gives an image at least 16 patches of the lane, so that a lane of C patches has C / 16 of them at most.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vitbatch.attention.blocks import NO_SCORE
from vitbatch.config import ATTENTION_BLOCK, TINY_BLOCK, TINY_ROOM
from vitbatch.lanes import Segments


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

    windows: an id a patch, or None. chunk: images computed at a time, and then no more than there are; None for all
    places at once, without a loop.
    """
    C, H, D = q.shape
    block = jnp.arange(segments.first.shape[0], dtype=jnp.int32)
    begins = (segments.first == block) & (segments.end > 0)
    places = C // TINY_ROOM
    first = jnp.nonzero(begins, size=places, fill_value=0)[0].astype(jnp.int32)
    count = begins.sum(dtype=jnp.int32)
    start = first * TINY_BLOCK
    end = jnp.where(jnp.arange(places, dtype=jnp.int32) < count, segments.end[first], 0)
    offset = jnp.arange(ATTENTION_BLOCK, dtype=jnp.int32)

    def attend(start, end) -> Float[Array, "n 64 H D"]:
        rows = jnp.minimum(start[:, None] + offset, C - 1)
        inside = start[:, None] + offset < end[:, None]

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

    if chunk is None or chunk >= places:
        found = attend(start, end)
    else:
        groups = -(-places // chunk)
        start, end = (jnp.pad(x, (0, groups * chunk - places)) for x in (start, end))

        def step(i, found):
            some = (lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in (start, end))
            return lax.dynamic_update_slice_in_dim(found, attend(*some), i * chunk, 0)

        empty = jnp.zeros((groups * chunk, ATTENTION_BLOCK, H, D), q.dtype)
        found = lax.fori_loop(0, -(-count // chunk), step, empty)
    place = jnp.repeat(jnp.cumsum(begins) - 1, TINY_BLOCK, total_repeat_length=C)
    row = jnp.arange(C, dtype=jnp.int32) - jnp.repeat(segments.first * TINY_BLOCK, TINY_BLOCK, total_repeat_length=C)
    real = jnp.arange(C) < jnp.repeat(segments.end, TINY_BLOCK, total_repeat_length=C)
    picked = found.at[jnp.maximum(place, 0), jnp.minimum(row, ATTENTION_BLOCK - 1)].get(mode="promise_in_bounds")
    return jnp.where(real[:, None, None], picked, 0)
