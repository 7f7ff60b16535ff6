"""Static arithmetic of the score budget: how many rows are scored before they are selected from."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from dsa_indexer.rows import pad_rows

LOGITS_BYTES = 512 << 20
"""Default bytes of scores (float32) alive at once. Plain XLA selects with a few times as much beside them. On an H200,
256 MiB take 4 % longer for 32768 rows and 8 % for an eighth of them: fewer, larger launches have fewer ends."""

_MOST_BYTES = (1 << 31) - 1
"""Of one chunk, whatever the budget: kernels and compilers count with 32 bits."""


def chunk_of(count: int, *, multiple: int, item_bytes: int, budget: int) -> int:
    """How many of `count` items go into one chunk: a multiple of `multiple` and at least that, within `budget` bytes
    and below 2 GiB where that allows it, in chunks as equal as possible. Raises ValueError if the budget is below 1
    byte."""
    if budget < 1:
        raise ValueError(f"logits_bytes is {budget}; it must be at least 1 (a whole row tile is scored in any case)")
    units = -(-count // multiple)
    most = max(min(budget, _MOST_BYTES) // (item_bytes * multiple), 1)
    chunks = max(-(-units // most), 1)
    return max(-(-units // chunks), 1) * multiple


def map_chunks(fn: Callable[..., Any], chunk: int, *arrays: Any) -> Any:
    """fn over the leading axis of all arrays, `chunk` items at a time, one chunk after another.

    fn takes arrays of `chunk` items and returns an array (or a pytree of them) of as many. The arrays are padded with
    zeros to whole chunks.
    """
    count = arrays[0].shape[0]
    chunks = max(-(-count // chunk), 1)
    padded = [pad_rows(x, chunks * chunk) for x in arrays]
    if chunks == 1:
        return jax.tree.map(lambda y: y[:count], fn(*padded))
    split = tuple(x.reshape(chunks, chunk, *x.shape[1:]) for x in padded)
    out = lax.map(lambda parts: fn(*parts), split)
    return jax.tree.map(lambda y: y.reshape(chunks * chunk, *y.shape[2:])[:count], out)
