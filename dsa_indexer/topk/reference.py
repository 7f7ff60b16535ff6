"""Exact selection in plain XLA, on integers."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

_INT_MAX = np.int32(0x7FFFFFFF)
_OUTSIDE = np.int32(-0x80000000)  # below the image of every float, -inf included
_INF_BITS = np.int32(0x7F800000)
_MINUS_INF_BITS = np.int32(-0x800000)


def sortable(x: Float32[Array, "*B"]) -> Int32[Array, "*B"]:
    """Integers in the order of the floats, with -0 equal to 0 and NaN of either sign equal to -inf.

    Only integer operations: how a backend compares NaN, or flushes subnormal numbers, does not matter here.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & _INT_MAX
    bits = jnp.where(magnitude > _INF_BITS, _MINUS_INF_BITS, jnp.where(magnitude == 0, 0, bits))
    return jnp.where(bits >= 0, bits, bits ^ _INT_MAX)


def select(
    scores: Float32[Array, "M N"], ks: Int32[Array, "M"], lengths: Int32[Array, "M"], k: int
) -> Int32[Array, "M k"]:
    """The k largest scores of each row within its window, ties to the smallest index."""
    num_keys = scores.shape[1]
    column = jnp.arange(num_keys, dtype=jnp.int32)
    relative = column - ks[:, None]
    inside = (relative >= 0) & (relative < lengths[:, None])
    order = jnp.where(inside, sortable(scores), _OUTSIDE)
    best, index = lax.top_k(order, min(k, num_keys))  # equal elements come in the order of their index
    found = jnp.where(best > _OUTSIDE, index - ks[:, None], _INT_MAX)
    found = lax.sort(found, dimension=1)
    found = jnp.where(found == _INT_MAX, -1, found)
    return jnp.pad(found, [(0, 0), (0, k - found.shape[1])], constant_values=-1)
