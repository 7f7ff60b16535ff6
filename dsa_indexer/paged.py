"""Score and select for decode: a few rows a request, keys in the paged cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from dsa_indexer.chunks import LOGITS_BYTES, chunk_of, map_chunks
from dsa_indexer.key_cache import require_addressable
from dsa_indexer.rows import unsettled
from dsa_indexer.scores import columns_of, paged_scores
from dsa_indexer.topk import NOTHING_FORCED, ForcedTokens, require_k, select_topk
from vitstripe.platform import Platform


def topk_paged(
    q: Float[Array, "B n H D"],
    gates: Float32[Array, "B n H"],
    key_pages: Float[Array, "P page D"],
    page_table: Int32[Array, "B maxpages"],
    lengths: Int32[Array, "B n"],
    *,
    k: int,
    scale_pages: Float32[Array, "P page"] | None = None,
    forced: ForcedTokens = NOTHING_FORCED,
    logits_bytes: int = LOGITS_BYTES,
    platform: Platform | None = None,
) -> Int32[Array, "B n k"]:
    """The k best keys of each of the n rows of B requests: 1 row to decode, more to verify speculated tokens.

    Row i of request b sees that request's first lengths[b, i] positions; position p lies at
    key_pages[page_table[b, p // page], p % page]. A length of 0 marks padding. Entries of page_table past a request's
    last page may hold anything. With n rows a request, row i usually sees one key more than row i - 1.
    scale_pages: a factor for the scores of each key, where the keys are quantised.

    Returns request-relative positions, int32 [B, n, k], ascending, -1 after the last: the bits `topk_rows` gives for
    the same keys laid out contiguously. Key blocks past a request's longest row are skipped.
    platform: what it is compiled for, None for the first device; it chooses between kernels and plain XLA.
    """
    require_k(k)
    require_addressable(key_pages)
    num_requests, num_rows = lengths.shape
    num_keys = page_table.shape[1] * key_pages.shape[1]
    item_bytes = 4 * max(columns_of(num_keys) * num_rows, 1)
    chunk = chunk_of(num_requests, multiple=1, item_bytes=item_bytes, budget=logits_bytes)
    if lengths.size == 0 or num_keys == 0:
        return jnp.full_like(lengths, -1, shape=(num_requests, num_rows, k))

    def score_and_select(q: Array, gates: Array, page_table: Array, lengths: Array) -> Array:
        wanted = unsettled(lengths, k)
        scores = paged_scores(q, gates, key_pages, scale_pages, page_table, wanted, platform=platform)
        flat = lengths.reshape(-1)
        found = select_topk(
            scores.reshape(-1, num_keys), jnp.zeros_like(flat), flat, k=k, forced=forced, platform=platform
        )
        return found.reshape(-1, num_rows, k)

    return map_chunks(score_and_select, chunk, q, gates, page_table, lengths)
