"""Query rows packed from several requests, and the index spaces their selections are expressed in.

Two requests with 3 and 2 new tokens on 10 and 4 keys (N = 14; the keys of all requests stand one after another):

    row m      0  1  2 | 3   4        columns   0 ........ 9 | 10 .. 13
    ks         0  0  0 | 10  10
    lengths    8  9 10 | 3   4        causal: each row sees its own token as its last key
    request    0  0  0 | 1   1

A selection is int32 [M, K], relative to ks, ascending, -1 after the last one.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@partial(jax.tree_util.register_dataclass, data_fields=["ks", "lengths", "request"], meta_fields=[])
@dataclass(frozen=True)
class RowBatch:
    """The key windows of M packed query rows: row m may see the keys [ks[m], ks[m] + lengths[m]).

    ks, lengths: int32 [M]. A length of 0 marks a padding row; windows must end within the keys.
    request: int32 [M], the request of each row (for `to_paged`), or None.
    """

    # Any, because a pytree's leaves are not always arrays: shardings, shape structs and None pass through here.
    ks: Any
    lengths: Any
    request: Any = None


def unsettled(lengths: Array, k: int) -> Array:
    """The lengths of the rows that need scores: 0 where a row has at most k keys, all of which are selected anyway."""
    return jnp.where(lengths > k, lengths, 0)


def require_rows(rows: RowBatch, num_rows: int) -> None:
    """Raises ValueError unless ks and lengths are int32 [num_rows]."""
    for name in ("ks", "lengths"):
        field = getattr(rows, name)
        if field.shape != (num_rows,) or field.dtype != jnp.int32:
            raise ValueError(
                f"RowBatch.{name} is {field.dtype}{list(field.shape)}; with {num_rows} query rows it must be "
                f"int32[{num_rows}]"
            )


def pad_rows(x: Array, total: int) -> Array:
    """Appends zeros to axis 0 up to `total` rows. A RowBatch leaf padded so holds rows of length 0."""
    return jnp.pad(x, [(0, total - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def to_paged(
    idx: Int32[Array, "M K"], request: Int32[Array, "M"], page_table: Int32[Array, "R maxpages"], page_size: int
) -> Int32[Array, "M K"]:
    """Relative positions -> physical slots page_table[request, position // page_size] * page_size + the rest.

    -1 stays -1, and so does a position whose page is not in the table (its entry is -1 or it lies past the last entry).
    """
    page = page_table.at[request[:, None], idx // page_size].get(mode="fill", fill_value=-1)
    return jnp.where((idx >= 0) & (page >= 0), page * page_size + idx % page_size, -1)


def to_ragged(idx: Int32[Array, "M K"], offsets: Int32[Array, "M"]) -> Int32[Array, "M K"]:
    """Relative positions -> columns of the concatenated keys: offsets[m] (ks, usually) is added. -1 stays -1."""
    return jnp.where(idx >= 0, idx + offsets[:, None], -1)
