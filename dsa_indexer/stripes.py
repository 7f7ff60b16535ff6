"""Who owns which row.

Rows [i S, (i + 1) S) form stripe i, which belongs to device i mod tp. With S = 2, tp = 3 and M = 9 rows:

    row      0  1 | 2  3 | 4  5 | 6  7 | 8  .        . = padding, length 0
    device   0  0 | 1  1 | 2  2 | 0  0 | 1  1 | 2  2

Ownership follows from (M, S, tp) and from nothing that a device could measure: two devices that disagreed on it would
leave rows with no writer or with two. Each function that computes on arrays works on numpy and on traced values alike.
"""

from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from dsa_indexer.config import StripeConfig
from dsa_indexer.rows import pad_rows

Ints = TypeVar("Ints", int, np.ndarray, Array)


def owner(row: Ints, stripe: int, tp: int) -> Ints:
    """The device that owns a row."""
    return (row // stripe) % tp


def rounds(num_rows: int, stripe: int, tp: int) -> int:
    """How many stripes each device holds, padding included."""
    return -(-num_rows // (stripe * tp))


def pairs_per_device(lengths: np.ndarray, stripe: int, tp: int) -> np.ndarray:
    """The pairs of a row and a key it sees that each device scores: int64 [tp], exact. Host."""
    lengths = np.maximum(np.asarray(lengths, np.int64), 0)
    whole = np.zeros(rounds(lengths.size, stripe, tp) * tp * stripe, np.int64)
    whole[: lengths.size] = lengths
    return whole.reshape(-1, tp, stripe).sum((0, 2))


def imbalance(lengths: np.ndarray, stripe: int, tp: int) -> float:
    """Pairs of the busiest device over the mean. The ideal speed-up is tp over this. Host."""
    pairs = pairs_per_device(lengths, stripe, tp)
    return float(pairs.max() * tp / pairs.sum()) if pairs.any() else 1.0


def take_owned(x: Array, device: Int32[Array, ""], stripe: int, tp: int) -> Array:
    """The rows of `device`, its stripes one after another: [M, ...] -> [rounds * S, ...], padded with zeros."""
    count = rounds(x.shape[0], stripe, tp)
    dealt = pad_rows(x, count * tp * stripe).reshape(count, tp, stripe, *x.shape[1:])
    return lax.dynamic_index_in_dim(dealt, device, axis=1, keepdims=False).reshape(-1, *x.shape[1:])


def place_owned(own: Array, device: Int32[Array, ""], num_rows: int, stripe: int, tp: int, fill: int) -> Array:
    """The inverse: own rows at their places among all num_rows rows, `fill` everywhere else."""
    count = rounds(num_rows, stripe, tp)
    buffer = jnp.full_like(own, fill, shape=(count, tp, stripe, *own.shape[1:]))
    dealt = own.reshape(count, 1, stripe, *own.shape[1:])
    placed = lax.dynamic_update_slice_in_dim(buffer, dealt, device, axis=1)
    return placed.reshape(-1, *own.shape[1:])[:num_rows]


def deal_back(parts: Array, num_rows: int, stripe: int, tp: int) -> Array:
    """All devices' rows, [tp, rounds * S, ...], in the order of the rows: [num_rows, ...]."""
    split = parts.reshape(tp, -1, stripe, *parts.shape[2:])
    return jnp.swapaxes(split, 0, 1).reshape(-1, *parts.shape[2:])[:num_rows]


def engages(
    num_rows: int, tp: int, mean_keys: float, config: StripeConfig, *, most_keys: int | None = None, k: int = 0
) -> tuple[bool, str]:
    """Whether striping this batch is worth it, and why. A host call on values that are equal on every device.

    num_rows: real rows, padding not counted. mean_keys: mean visible keys of a real row. The gain of a row grows with
    its keys and the cost of merging it does not, so only the mean decides, not the number of rows.
    most_keys: the keys of the longest row, where known: if that is at most k, each row takes all its keys, and there is
    nothing to score and nothing to stripe.

    Where this says no, run the replicated program (`topk_rows`), which holds no collective.
    """
    if tp == 1:
        return False, "one device: nothing to stripe over"
    if num_rows < tp:
        return False, f"{num_rows} row(s) for {tp} devices: some would have none"
    if most_keys is not None and most_keys <= k:
        return False, f"no row has more than {most_keys} keys and k is {k}: every row takes them all"
    if mean_keys < config.min_mean_keys:
        return False, f"{mean_keys:.0f} keys a row on average, below min_mean_keys = {config.min_mean_keys}"
    return True, f"{num_rows} rows of {mean_keys:.0f} keys on average over {tp} devices, {config.rows} rows a stripe"
