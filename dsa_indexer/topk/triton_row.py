"""One row of scores inside a selection kernel: reading it, guessing a threshold, listing what reaches it.

Inside, a score is an int32 in the order of the floats. What the pass over a row compares is cheaper than `sortable`: -0
stays -1, one below 0, and NaNs with their sign bit set stay below -inf. The pass makes up for it in its thresholds, and
`sortable` settles it among the candidates.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from dsa_indexer.topk.order import INT_MAX, OUTSIDE, ForcedTokens, sortable

_RUN_BITS = np.int32(3)
_RUN = 1 << _RUN_BITS
"""Neighbouring scores a sample takes: what one memory transaction brings anyway."""
_SIGN = np.int32(-0x80000000)
_INF = np.int32(0x7F800000)
_MINUS_INF = np.int32(-0x7F800001)  # the order of -inf

Write = Callable[[Array, Array, Array, Array], None]
"""write(place in the list, score, column, mask)"""


def at_least(values: Array, k: Array | int, lowest: Array, spare: Array | int = 0) -> tuple[Array, Array]:
    """A threshold that at least k and at most k + spare of the int32 `values` reach, or, where equal values leave no
    such threshold, the k-th largest value; and how many reach it. From its highest bit down, but for the bits that the
    largest value and `lowest` share, which is no larger than the k-th largest."""
    low, high = lowest ^ _SIGN, jnp.max(values) ^ _SIGN
    differing = jnp.int32(32) - lax.clz(low ^ high)
    shared = jnp.where(differing == 32, 0, lax.shift_left(jnp.int32(-1), jnp.minimum(differing, 31)))

    def settle(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, known, count = state
        trial = known | lax.shift_left(jnp.int32(1), bit)
        reached = jnp.sum((values >= (trial ^ _SIGN)).astype(jnp.int32))
        enough = reached >= k
        return bit - 1, jnp.where(enough, trial, known), jnp.where(enough, reached, count)

    start = (differing - 1, low & shared, jnp.int32(values.shape[0]))
    _, known, count = lax.while_loop(lambda state: (state[0] >= 0) & (state[2] > k + spare), settle, start)
    return known ^ _SIGN, count


def halves(packed: Array) -> tuple[Array, Array]:
    """The low and the high 16 bits."""
    return packed & jnp.int32(0xFFFF), lax.shift_right_logical(packed, jnp.int32(16))


def pack(above: Array, level: Array) -> Array:
    """Two flags as counts of 16 bits each, so that one scan ranks both."""
    return jnp.where(above, jnp.int32(1), jnp.where(level, jnp.int32(1 << 16), jnp.int32(0)))


class Row:
    """The window of a row. Positions count from its first column.

    Nothing is said of how it is aligned, so that a thread reads single scores and not four together: the candidates are
    then written from where they were computed, without a way through shared memory.
    """

    def __init__(self, scores_ref: Any, row: Array, ks: Array, length: Array, forced: ForcedTokens):
        self.scores_ref, self.row, self.ks, self.length, self.forced = scores_ref, row, ks, length, forced

    def is_forced(self, position: Array) -> Array | None:
        """None where no configuration forces a key."""
        first, last = self.forced.first, self.forced.last
        return (position < first) | (position >= self.length - last) if first or last else None

    def sample(self, size: int, rank: Array) -> tuple[Array, Array]:
        """About the rank-th largest of `size` scores (runs of neighbours, spread evenly over the row), and whether so
        many are equal to it that the row's candidates must be counted one by one."""
        runs = jnp.int32(size // _RUN)
        number = jnp.arange(size, dtype=jnp.int32)
        run, place = lax.shift_right_logical(number, _RUN_BITS), number & jnp.int32(_RUN - 1)
        # run * length / runs, without overflow; side by side if the row is no longer.
        spread = run * lax.div(self.length, runs) + lax.div(run * lax.rem(self.length, runs), runs)
        position = jnp.where(self.length >= size, spread, run * jnp.int32(_RUN)) + place
        inside = position < self.length
        # Forced keys count by their scores here: they are few, and this is a guess.
        order = sortable(plt.load(self.scores_ref.at[self.row, self.ks + position], mask=inside, other=0.0))
        order = jnp.where(inside, order, OUTSIDE)
        spare = lax.div(rank, jnp.int32(16))
        threshold, reached = at_least(order, rank, jnp.min(order), spare)
        return jnp.maximum(threshold, OUTSIDE + 1), reached > rank + spare

    def load(self, start: Array, size: int, mask: Array | None = None) -> Array:
        """The scores at start .. start + size - 1, 0 where the mask is False."""
        at = self.scores_ref.at[self.row, pl.ds(self.ks + start, size)]
        return plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)

    def order(self, score: Array, position: Array) -> Array:
        """What the pass compares."""
        bits = lax.bitcast_convert_type(score, jnp.int32)
        order = bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & INT_MAX)
        order = jnp.where(order > _INF, _MINUS_INF, order)
        is_forced = self.is_forced(position)
        return order if is_forced is None else jnp.where(is_forced, INT_MAX, order)

    def pass_over(
        self, threshold: Array, read: int, k: int, capacity: int, write: Write, *, fast: bool
    ) -> tuple[Array, Array]:
        """Hands the candidates to write(place, score, column, mask). Returns how many columns are above the threshold
        and how many equal it. fast: equal columns are counted as if above, all of them candidates, but for the few of
        the last step."""
        # -0 and 0 are equal, and so are -inf and every NaN.
        lowest = jnp.where(threshold == 0, -1, jnp.where(threshold <= _MINUS_INF, OUTSIDE, threshold))
        half = read // 2
        lane, half_lane = jnp.arange(read, dtype=jnp.int32), jnp.arange(half, dtype=jnp.int32)

        def careful(step: Array, score: Array, inside: Array | None, before: tuple[Array, Array]):
            above_before, level_before = before
            position = step * read + lane
            order = self.order(score, position)
            above, level = order > threshold, order >= lowest
            if inside is not None:
                above, level = above & inside, level & inside
            packed = pack(above, level)
            above_rank, level_rank = halves(jnp.cumsum(packed, axis=0))
            above_total, level_total = halves(jnp.sum(packed))
            level_rank = level_rank + level_before
            place = above_before + above_rank + jnp.minimum(level_rank, k) - 1
            # level holds for those above, too.
            kept = level & (above | (level_rank <= k)) & (place < capacity)
            # Interpreted, a masked store still writes back what it found: nowhere, then.
            write(jnp.where(kept, place, capacity), score, position, kept)
            return above_before + above_total, level_before + level_total

        def both_halves(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            before, *scores = carry
            start = jnp.minimum(step + 1, steps - 1) * read
            following = (self.load(start, half), self.load(start + half, half))  # under way while this step computes
            position = step * read + half_lane
            first = self.order(scores[0], position) >= lowest
            second = self.order(scores[1], position + half) >= lowest
            packed = first.astype(jnp.int32) | jnp.where(second, jnp.int32(1 << 16), jnp.int32(0))
            first_rank, second_rank = halves(jnp.cumsum(packed, axis=0))
            first_total, second_total = halves(jnp.sum(packed))
            for reached, rank, before_half, score, column in (
                (first, first_rank, before, scores[0], position),
                (second, second_rank, before + first_total, scores[1], position + half),
            ):
                place = rank + (before_half - 1)
                kept = reached & (place < capacity)
                write(jnp.where(kept, place, capacity), score, column, kept)
            return before + first_total + second_total, *following

        def whole(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            above, level, score = carry
            following = self.load(jnp.minimum(step + 1, steps - 1) * read, read)
            return *careful(step, score, None, (above, level)), following

        def rest(step: Array, before: tuple[Array, Array]) -> tuple[Array, Array]:
            inside = step * read + lane < self.length
            return careful(step, self.load(step * read, read, inside), inside, before)

        steps = lax.div(self.length, jnp.int32(read))
        zero = jnp.int32(0)
        if fast:
            ahead = [self.load(zero + i * half, half, half_lane + i * half < self.length) for i in (0, 1)]
            above, *_ = lax.fori_loop(zero, steps, both_halves, (zero, *ahead))
            level = zero
        else:
            ahead = self.load(zero, read, lane < self.length)
            above, level, _ = lax.fori_loop(zero, steps, whole, (zero, zero, ahead))
        return lax.fori_loop(steps, lax.div(self.length + jnp.int32(read - 1), jnp.int32(read)), rest, (above, level))
