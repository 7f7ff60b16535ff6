"""Exact selection without a sort: find the k-th largest value by counting, then collect what is not below it.

    1. the k-th value t, from its highest bit down: how many columns are at least this candidate?   32 reads
    2. one bit a column, 32 columns a word:  above = value > t,  level = value == t                 one read
    3. the columns kept ahead of column c:   above(c) + min(level(c), k - all above)                N / 32
    4. the j-th selected column is the last with fewer than j kept ahead of it, by bisection        k * log N

There is no list of candidates, so nothing can overflow however many values are equal.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from dsa_indexer.topk.order import INT_MAX, OUTSIDE

_WORD = 32
_SIGN = np.int32(-0x80000000)


def _signed(offset: UInt32[Array, "*B"]) -> Int32[Array, "*B"]:
    """0 .. 2^32 - 1 onto the int32 in the same order."""
    return lax.bitcast_convert_type(offset, jnp.int32) ^ _SIGN


def kth_largest(order: Int32[Array, "M N"], k: int, bits: int) -> Int32[Array, "M"]:
    """The largest t of which at least k columns are no smaller; the lowest int32 if there are fewer than k columns.

    bits: bits of t settled by one read of `order`, a divisor of 32; a read makes 2^bits - 1 counts.
    """

    def settle(step: Int32[Array, ""], known: UInt32[Array, "M"]) -> UInt32[Array, "M"]:
        shift = (_WORD - bits * (step + 1)).astype(jnp.uint32)
        digits = [
            (order >= _signed(known + (jnp.uint32(digit) << shift))[:, None]).sum(1, dtype=jnp.int32) >= k
            for digit in range(1, 2**bits)
        ]
        # Counts fall as the digit grows, so the digits that pass are the first ones.
        passed = sum((digit.astype(jnp.uint32) for digit in digits), jnp.zeros_like(known))
        return known + (passed << shift)

    # zeros_like, so that under shard_map the carry varies over the same mesh axes as the rows.
    start = jnp.zeros_like(order, shape=order.shape[:1], dtype=jnp.uint32)
    return _signed(lax.fori_loop(0, _WORD // bits, settle, start))


def _words(mask: Array) -> UInt32[Array, "M W"]:
    split = mask.reshape(mask.shape[0], -1, _WORD).astype(jnp.uint32)
    return (split << jnp.arange(_WORD, dtype=jnp.uint32)).sum(2, dtype=jnp.uint32)


def select(order: Int32[Array, "M N"], k: int, bits: int = 1) -> Int32[Array, "M k"]:
    """Columns of the k largest of each row above OUTSIDE, ties to the smallest; ascending, INT_MAX after the last."""
    order = jnp.pad(order, [(0, 0), (0, -order.shape[1] % _WORD)], constant_values=OUTSIDE)
    num_keys = order.shape[1]
    threshold = kth_largest(order, k, bits)[:, None]
    # The columns above the threshold and those level with it, [2, M, W], and a word for the position after the last.
    words = jnp.stack([_words(order > threshold), _words((order == threshold) & (order > OUTSIDE))])
    words = jnp.pad(words, [(0, 0), (0, 0), (0, 1)])
    counts = lax.population_count(words).astype(jnp.int32)
    until = jnp.cumsum(counts, axis=2)
    before = until - counts
    wanted = k - until[0, :, -1:]  # of the level columns, the first ones

    def kept_ahead(column: Int32[Array, "M k"]) -> Int32[Array, "M k"]:
        word = column[None] // _WORD
        lower = (jnp.uint32(1) << (column % _WORD).astype(jnp.uint32)) - jnp.uint32(1)
        within = lax.population_count(jnp.take_along_axis(words, word, axis=2) & lower).astype(jnp.int32)
        above, level = jnp.take_along_axis(before, word, axis=2) + within
        return above + jnp.minimum(level, wanted)

    n = jnp.arange(1, k + 1, dtype=jnp.int32)
    steps = num_keys.bit_length()

    def descend(step: Int32[Array, ""], column: Int32[Array, "M k"]) -> Int32[Array, "M k"]:
        further = column + (jnp.int32(1) << (steps - 1 - step))
        fewer = kept_ahead(jnp.minimum(further, num_keys)) < n
        return jnp.where((further <= num_keys) & fewer, further, column)

    column = lax.fori_loop(0, steps, descend, jnp.zeros_like(order, shape=(order.shape[0], k)))
    return jnp.where(n <= k - wanted + jnp.minimum(until[1, :, -1:], wanted), column, INT_MAX)
