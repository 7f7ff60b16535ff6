"""Selection: from scores to indices."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from dsa_indexer.topk import reference, threshold
from dsa_indexer.topk.order import INT_MAX, NOTHING_FORCED, ForcedTokens, window_order
from dsa_indexer.topk.triton import LARGEST_K, select_topk_triton
from vitstripe.platform import Platform, default_platform

__all__ = ["IMPLEMENTATIONS", "NOTHING_FORCED", "ForcedTokens", "require_k", "select_topk", "take_all"]

IMPLEMENTATIONS: dict[str, Callable[[Array, int], Array]] = {
    "top_k": reference.select,
    "threshold": threshold.select,
    "threshold, 2 bits a read": partial(threshold.select, bits=2),
    "threshold, 4 bits a read": partial(threshold.select, bits=4),
}
"""All give the same bits."""

DEFAULT = "threshold"
"""In plain XLA; see docs/indexer.md."""


def require_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 key must be selected a row")


def take_all(lengths: Int32[Array, "M"], k: int) -> Int32[Array, "M k"]:
    """What is selected of rows with at most k keys: 0, 1, ..., length - 1, then -1."""
    position = jnp.arange(k, dtype=jnp.int32)
    return jnp.where(position < lengths[:, None], position, -1)


@jax.named_scope("select")
def select_topk(
    scores: Float32[Array, "M N"],
    ks: Int32[Array, "M"],
    lengths: Int32[Array, "M"],
    *,
    k: int,
    forced: ForcedTokens = NOTHING_FORCED,
    platform: Platform | None = None,
    implementation: str | None = None,
) -> Int32[Array, "M k"]:
    """The k largest of scores[m, ks[m] : ks[m] + lengths[m]], as positions relative to ks, ascending, then -1.

    Exact, and the same on every device and in every launch: ties go to the smallest index, -0 equals 0, NaN and -inf
    rank last but are keys like any other when fewer than k are better. Columns outside the window are never read as
    scores. A length of 0 or below gives -1 alone. forced: keys that come before all others.

    platform: what it is compiled for, None for the first device. On a GPU kernels select, for k up to LARGEST_K; plain
    XLA does elsewhere, and where `implementation` names one of IMPLEMENTATIONS. Where no row has more than k keys,
    nothing is compared.
    """
    platform = platform or default_platform()
    if implementation is None and platform.runs_kernels and k <= LARGEST_K:
        return select_topk_triton(scores, ks, lengths, k=k, forced=forced, platform=platform)
    select = IMPLEMENTATIONS[implementation or DEFAULT]

    def compare() -> Int32[Array, "M k"]:
        column = select(window_order(scores, ks, lengths, forced), k)
        return jnp.where(column == INT_MAX, -1, column - ks[:, None])

    def all_of_them() -> Int32[Array, "M k"]:
        # Zeros of the scores, so that under shard_map both branches vary over the same mesh axes.
        return take_all(lengths + jnp.zeros_like(scores, shape=lengths.shape, dtype=jnp.int32), k)

    # No collective stands in either branch, so devices may take different ones.
    return lax.cond(jnp.any(lengths > k), compare, all_of_them)
