"""Scores as integers: what every implementation of the selection compares."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

INT_MAX = np.int32(0x7FFFFFFF)
OUTSIDE = np.int32(-0x80000000)
"""Below the image of every float, -inf included: a column that is no key of the row."""
_INF_BITS = np.int32(0x7F800000)
_MINUS_INF_BITS = np.int32(-0x800000)


@dataclass(frozen=True)
class ForcedTokens:
    """Keys that are selected whatever they score: the first and the last ones of each row's window.

    first, last: how many (`index_init_tokens` and `index_local_tokens` of a configuration). A key of both counts once.
    Where more are forced than k, the smallest indices stay. Raises ValueError below 0.
    """

    first: int = 0
    last: int = 0

    def __post_init__(self):
        for name in ("first", "last"):
            if getattr(self, name) < 0:
                raise ValueError(f"ForcedTokens.{name} is {getattr(self, name)}; it must be at least 0")


NOTHING_FORCED = ForcedTokens()


def sortable(x: Float32[Array, "*B"]) -> Int32[Array, "*B"]:
    """Integers in the order of the floats, with -0 equal to 0 and NaN of either sign equal to -inf.

    Only integer operations: how a backend compares NaN, or flushes subnormal numbers, does not matter here.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & INT_MAX
    bits = jnp.where(magnitude > _INF_BITS, _MINUS_INF_BITS, jnp.where(magnitude == 0, 0, bits))
    return jnp.where(bits >= 0, bits, bits ^ INT_MAX)


def window_order(
    scores: Float32[Array, "M N"], ks: Int32[Array, "M"], lengths: Int32[Array, "M"], forced: ForcedTokens
) -> Int32[Array, "M N"]:
    """What to rank the columns of each row by: OUTSIDE for those outside its window, INT_MAX for forced ones."""
    relative = jnp.arange(scores.shape[1], dtype=jnp.int32) - ks[:, None]
    order = sortable(scores)
    if forced.first or forced.last:
        order = jnp.where((relative < forced.first) | (relative >= lengths[:, None] - forced.last), INT_MAX, order)
    return jnp.where((relative >= 0) & (relative < lengths[:, None]), order, OUTSIDE)
