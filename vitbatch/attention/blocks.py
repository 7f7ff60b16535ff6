"""Lanes cut into attention blocks, and blocks into chunks that are computed one after the other."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from vitbatch.config import ATTENTION_BLOCK, TINY_BLOCK

# Finite, so that the difference of two of them is 0 and not NaN.
NO_SCORE = -1e30


def block_size(capacity: int, blocks: int) -> int:
    """Patches a block of a lane. Raises ValueError unless they are 64, or 4 in a tiny lane."""
    for size in (ATTENTION_BLOCK, TINY_BLOCK):
        if capacity == size * blocks:
            return size
    raise ValueError(
        f"a lane of {capacity} patches in {blocks} blocks: a block has {ATTENTION_BLOCK} patches, or {TINY_BLOCK}"
    )


def to_blocks(x: Float[Array, "C H D"], size: int) -> Float[Array, "B H {size} D"]:
    return x.reshape(-1, size, *x.shape[1:]).transpose(0, 2, 1, 3)


def from_blocks(x: Float[Array, "B H S D"]) -> Float[Array, "C H D"]:
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def to_chunks(x: Shaped[Array, "B *S"], chunk: int) -> Shaped[Array, "G {chunk} *S"]:
    """Groups of `chunk` blocks; zeros fill the last one."""
    groups = -(-x.shape[0] // chunk)
    padded = jnp.pad(x, [(0, groups * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(groups, chunk, *x.shape[1:])
