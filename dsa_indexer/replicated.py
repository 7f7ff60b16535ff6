"""Score and select on one device, or the same on every device of a mesh: the oracle of the striped form."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from dsa_indexer.chunks import LOGITS_BYTES, chunk_of, map_chunks
from dsa_indexer.rows import RowBatch, require_rows, unsettled
from dsa_indexer.scores import ROW_TILE, columns_of, row_scores
from dsa_indexer.topk import NOTHING_FORCED, ForcedTokens, require_k, select_topk, take_all
from vitstripe.platform import Platform


def topk_rows(
    q: Float[Array, "M H D"],
    gates: Float32[Array, "M H"],
    keys: Float[Array, "N D"],
    key_scales: Float32[Array, "N"] | None,
    rows: RowBatch,
    *,
    k: int,
    forced: ForcedTokens = NOTHING_FORCED,
    logits_bytes: int = LOGITS_BYTES,
    platform: Platform | None = None,
) -> Int32[Array, "M k"]:
    """The k best keys of each row within its window.

    Returns int32 [M, k], relative to rows.ks, ascending, -1 after the last. Any M and N, 0 included. A row's result
    depends on that row, its keys, k and forced alone: not on M, on the other rows, or on logits_bytes.

    A row of at most k keys takes them all and is not scored; where a chunk has only such rows, nothing is compared.
    forced: keys that every row takes before all others.
    logits_bytes: scores of at most this many bytes (but of 8 rows at least, and less than 2 GiB) are alive at once;
    rows go in chunks.
    platform: what it is compiled for, None for the first device; it chooses between kernels and plain XLA.
    Raises ValueError for k or logits_bytes below 1 and for a RowBatch that does not fit M.
    """
    require_k(k)
    num_rows, num_keys = q.shape[0], keys.shape[0]
    require_rows(rows, num_rows)
    columns = columns_of(num_keys)
    chunk = chunk_of(num_rows, multiple=ROW_TILE, item_bytes=4 * max(columns, 1), budget=logits_bytes)
    if num_keys == 0:
        return jnp.full_like(rows.ks, -1, shape=(num_rows, k))
    if num_rows == 0 or num_keys <= k:
        return take_all(rows.lengths, k)

    def score_and_select(q: Array, gates: Array, ks: Array, lengths: Array) -> Array:
        scores = row_scores(q, gates, keys, key_scales, ks, unsettled(lengths, k), platform=platform)
        return select_topk(scores, ks, lengths, k=k, forced=forced, platform=platform)

    return map_chunks(score_and_select, chunk, q, gates, rows.ks, rows.lengths)
