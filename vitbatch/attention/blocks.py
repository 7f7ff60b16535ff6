"""Lanes cut into attention blocks, and blocks into chunks that are computed one after the other."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from vitbatch.config import ATTENTION_BLOCK

# Finite, so that the difference of two of them is 0 and not NaN.
NO_SCORE = -1e30


def num_blocks(capacity: int) -> int:
    """Raises ValueError when a lane of `capacity` patches is no whole number of blocks."""
    if capacity % ATTENTION_BLOCK:
        raise ValueError(f"a lane of {capacity} patches is not a multiple of {ATTENTION_BLOCK}")
    return capacity // ATTENTION_BLOCK


def to_blocks(x: Float[Array, "C H D"]) -> Float[Array, "B H 64 D"]:
    return x.reshape(-1, ATTENTION_BLOCK, *x.shape[1:]).transpose(0, 2, 1, 3)


def from_blocks(x: Float[Array, "B H 64 D"]) -> Float[Array, "C H D"]:
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def to_chunks(x: Shaped[Array, "B *S"], chunk: int) -> Shaped[Array, "G {chunk} *S"]:
    """Groups of `chunk` blocks; zeros fill the last one."""
    groups = -(-x.shape[0] // chunk)
    padded = jnp.pad(x, [(0, groups * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(groups, chunk, *x.shape[1:])
