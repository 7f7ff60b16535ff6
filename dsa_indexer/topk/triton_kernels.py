"""The bodies of the selection kernels; `dsa_indexer.topk.triton` says how they work together.

All take scores [M, N], ks [M] and lengths [M] as `select_topk` does, and pass on through memory, a row each: threshold
(int32, the order of a float) and careful (whether so many scores equal it that they must be counted one by one); the
candidates' values and columns, `capacity` of them at most; above and level, how many columns are above the threshold
and how many equal it, so that above + min(level, k) candidates are listed.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from dsa_indexer.tiles import SelectTile
from dsa_indexer.topk.order import INT_MAX, OUTSIDE, ForcedTokens, sortable
from dsa_indexer.topk.triton_row import Row, Write, at_least, halves, pack

_GUESSES = 3
"""Thresholds taken from the sample before they are bisected."""


def goal(k: int, capacity: int) -> float:
    """The rank a guess aims at: k and capacity are equally far from it, in proportion."""
    return (k * capacity) ** 0.5


def _aim(length: Array, size: int, k: int, capacity: int) -> Array:
    """The rank in a sample of `size` that the goal in the row corresponds to, float32."""
    taken = jnp.minimum(length, size).astype(jnp.float32)
    return taken * goal(k, capacity) / jnp.maximum(length, 1).astype(jnp.float32)


def _rank(aim: Array, size: int) -> Array:
    return jnp.clip(aim, 1.0, float(size)).astype(jnp.int32)


def _writer(values_ref: Any, columns_ref: Any, row: Array) -> Write:
    def write(place: Array, score: Array, column: Array, mask: Array) -> None:
        plt.store(values_ref.at[row, place], score, mask=mask)
        plt.store(columns_ref.at[row, place], column, mask=mask)

    return write


def _fits(above: Array, level: Array, k: int, capacity: int) -> tuple[Array, Array]:
    """Whether the threshold was too low (more candidates than the list holds), and whether too high (fewer than k)."""
    return above + jnp.minimum(level, k) > capacity, above + level < k


def _row_of_program() -> Array:
    """Last rows first: in a causal batch they are the longest, and the short ones fill the gaps at the end."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def guess_kernel(
    scores_ref: Any,
    ks_ref: Any,
    lengths_ref: Any,
    threshold_ref: Any,
    careful_ref: Any,
    *,
    k: int,
    capacity: int,
    forced: ForcedTokens,
    tile: SelectTile,
):
    row = _row_of_program()
    length = lengths_ref[row]

    def guess():
        rank = _rank(_aim(length, tile.sample, k, capacity), tile.sample)
        threshold, careful = Row(scores_ref, row, ks_ref[row], length, forced).sample(tile.sample, rank)
        threshold_ref[row] = threshold
        careful_ref[row] = careful.astype(jnp.int32)

    def lowest():
        threshold_ref[row] = OUTSIDE + 1
        careful_ref[row] = jnp.int32(0)

    lax.cond(length > capacity, guess, lowest)


def filter_kernel(
    scores_ref: Any,
    ks_ref: Any,
    lengths_ref: Any,
    threshold_ref: Any,
    careful_ref: Any,
    values_ref: Any,
    columns_ref: Any,
    above_ref: Any,
    level_ref: Any,
    *,
    k: int,
    capacity: int,
    forced: ForcedTokens,
    tile: SelectTile,
):
    row = _row_of_program()
    length = lengths_ref[row]

    def work(fast: bool):
        window, write = Row(scores_ref, row, ks_ref[row], length, forced), _writer(values_ref, columns_ref, row)
        above, level = window.pass_over(threshold_ref[row], tile.read, k, capacity, write, fast=fast)
        above_ref[row] = above
        level_ref[row] = level

    # A row of at most k keys needs no comparison: the last kernel writes them all.
    careful = careful_ref[row] != 0
    pl.when((length > k) & ~careful)(partial(work, fast=True))
    pl.when((length > k) & careful)(partial(work, fast=False))


def repair_kernel(
    scores_ref: Any,
    ks_ref: Any,
    lengths_ref: Any,
    threshold_ref: Any,
    _values_in: Any,
    _columns_in: Any,
    above_in: Any,
    level_in: Any,
    values_ref: Any,
    columns_ref: Any,
    above_ref: Any,
    level_ref: Any,
    *,
    k: int,
    capacity: int,
    forced: ForcedTokens,
    tile: SelectTile,
):
    """The last four refs are the four before them, changed in place where a row needs it."""
    first_row, num_rows = pl.program_id(0) * tile.repair_rows, scores_ref.shape[0]

    def one(i: Array, carry: Array) -> Array:
        row = first_row + i
        # Programs of the last rows have none to spare; their loads are masked off.
        length = plt.load(lengths_ref.at[row], mask=row < num_rows, other=0)
        wanted = length > k
        above = plt.load(above_in.at[row], mask=wanted, other=k)
        level = plt.load(level_in.at[row], mask=wanted, other=0)
        too_low, too_high = _fits(above, level, k, capacity)

        def again():
            window, write = Row(scores_ref, row, ks_ref[row], length, forced), _writer(values_ref, columns_ref, row)

            def another(state: tuple[Array, ...]) -> tuple[Array, ...]:
                attempt, threshold, low, high, aim, *_ = state
                above, level = window.pass_over(threshold, tile.repair_read, k, capacity, write, fast=False)
                too_low, too_high = _fits(above, level, k, capacity)
                low = jnp.where(too_low, threshold + 1, low)
                high = jnp.where(too_high, threshold - 1, high)
                # The rank that would have been right, if the sample's ranks were the row's.
                reached = jnp.maximum(above + jnp.minimum(level, 1), 1).astype(jnp.float32)
                aim = aim * goal(k, capacity) / reached
                sampled, _ = window.sample(tile.sample, _rank(aim, tile.sample))
                middle = (low & high) + lax.shift_right_arithmetic(low ^ high, jnp.int32(1))
                threshold = jnp.where(attempt < _GUESSES, jnp.clip(sampled, low, high), middle)
                return attempt + 1, threshold, low, high, aim, above, level, (too_low | too_high).astype(jnp.int32)

            # The first pass is over the same threshold, carefully: perhaps there were only too many equal columns.
            start = (
                jnp.int32(0),
                threshold_ref[row],
                jnp.int32(OUTSIDE + 1),
                jnp.int32(INT_MAX),
                _aim(length, tile.sample, k, capacity),
                jnp.int32(0),
                jnp.int32(0),
                jnp.int32(1),
            )
            *_, above_now, level_now, _ = lax.while_loop(lambda state: state[-1] != 0, another, start)
            above_ref[row] = above_now
            level_ref[row] = level_now

        pl.when(wanted & (too_low | too_high))(again)
        return carry

    lax.fori_loop(0, tile.repair_rows, one, jnp.int32(0))


def pick_kernel(
    lengths_ref: Any,
    values_ref: Any,
    columns_ref: Any,
    above_ref: Any,
    level_ref: Any,
    out_ref: Any,
    *,
    k: int,
    capacity: int,
    forced: ForcedTokens,
    tile: SelectTile,
):
    row = pl.program_id(0)
    length = lengths_ref[row]
    number = jnp.arange(capacity, dtype=jnp.int32)

    def choose():
        valid = number < above_ref[row] + jnp.minimum(level_ref[row], k)
        order = sortable(plt.load(values_ref.at[row, :], mask=valid, other=0.0))
        column = plt.load(columns_ref.at[row, :], mask=valid, other=-1)
        if forced.first or forced.last:
            order = jnp.where((column < forced.first) | (column >= length - forced.last), INT_MAX, order)
        order = jnp.where(valid, order, OUTSIDE)
        threshold, _ = at_least(order, k, jnp.min(jnp.where(valid, order, INT_MAX)))
        above, level = order > threshold, (order == threshold) & valid
        packed = pack(above, level)
        above_rank, level_rank = halves(jnp.cumsum(packed, axis=0))
        wanted = k - halves(jnp.sum(packed))[0]
        kept = above | (level & (level_rank <= wanted))
        place = jnp.where(kept, above_rank + jnp.minimum(level_rank, wanted) - 1, k)
        plt.store(out_ref.at[row, place], column, mask=kept)

    def take_all():
        plt.store(out_ref.at[row, jnp.minimum(number, k)], jnp.where(number < length, number, -1), mask=number < k)

    lax.cond(length > k, choose, take_all)
