"""Which keys the rows of a pass attend to: an indexer over its own paged cache, one key a token or a pool of tokens.

A prefill pass gathers the index keys of all its requests and selects for its rows, replicated or striped over the mesh;
a decode pass scores one row a request against that request's pages. float8 keys have scales in pages of their own; a
pool's key is quantised when it closes, and the open pools of the requests stay as the model gives them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsa_indexer import (
    Indexer,
    IndexerConfig,
    KeyFormat,
    PooledIndexer,
    PoolTail,
    RowBatch,
    StripeConfig,
    encode_keys,
    encode_queries,
    expand_pools,
    gather_keys,
    store_keys,
    striped_topk_rows_local,
    topk_paged,
    topk_rows,
)
from serving.models.decoder import CacheArray, Selection
from serving.models.shards import Shards
from serving.models.step import Step

Angles = tuple[Float[Array, "T r"], Float[Array, "T r"]] | None
"""cos and sin of the rotated columns of each row, None for a model that does not rotate."""


def index_caches(c: IndexerConfig, form: KeyFormat) -> dict[str, CacheArray]:
    """What an indexer keeps: a key a token; or a key a closed pool, and the open pool of each request. float8 keys come
    with a scale each."""
    every = c.pool or 1
    kept = {"index": CacheArray((c.head_dim,), every=every, dtype=form.jax_dtype)}
    if form.is_fp8:
        kept["index_scales"] = CacheArray((), every=every, dtype=jnp.float32)
    if c.pool is not None:
        tail = CacheArray((c.pool, c.head_dim), per_request=True)
        kept |= {"tail_keys": tail, "tail_scores": tail}
    return kept


def select(
    indexer: Indexer | PooledIndexer,
    form: KeyFormat,
    x: Float[Array, "T D"],
    q_lora: Float[Array, "T rank"],
    angles: Angles,
    cache,
    step: Step,
    selection: Selection,
    shards: Shards,
):
    """(the layer's cache with the keys of these rows, positions [T, width] of what each row attends to: relative to its
    request, ascending, -1 padded). form: of the cached keys; x: the attention's input; q_lora: after q_a_layernorm."""
    cos, sin = angles or (None, None)
    q, gates = encode_queries(*indexer.queries(x, q_lora, cos, sin), form)
    if isinstance(indexer, PooledIndexer):
        cache = _keep_pools(indexer, form, *indexer.token_keys(x, cos, sin), cache, step)
        pools = _best(indexer.config, q, gates, cache, step, selection, shards)
        # Only pool numbers go over the mesh; every device expands them for itself.
        return cache, expand_pools(pools, step.lengths, indexer.config.pool or 1)
    cache = _store(form, indexer.keys(x, cos, sin), step.slots, cache)
    return cache, _best(indexer.config, q, gates, cache, step, selection, shards)


def _store(form: KeyFormat, keys, slots, cache):
    """The cache with the keys, and their scales where they have any, in these slots."""
    keys, scales = encode_keys(keys, form)
    cache = {**cache, "index": store_keys(cache["index"], keys, slots)}
    if scales is not None:
        cache["index_scales"] = store_keys(cache["index_scales"], scales, slots)
    return cache


def _keep_pools(indexer: PooledIndexer, form: KeyFormat, keys, scores, cache, step: Step):
    """Adds the rows to their requests' open pools, and what they close to the paged keys."""
    pool = indexer.config.pool or 1
    request = jnp.repeat(step.tile_request, step.tile)
    place = jnp.where(step.lengths > 0, step.seats[request], -1)
    tail = PoolTail(cache["tail_keys"], cache["tail_scores"])
    closed, tail = indexer.close(tail, keys, scores, place, step.lengths - 1)
    cache = {**cache, "tail_keys": tail.keys, "tail_scores": tail.scores}
    return _store(form, closed.keys, closed.slots(step.slots // pool), cache)


def _best(c: IndexerConfig, q, gates, cache, step: Step, selection: Selection, shards: Shards) -> Int[Array, "T k"]:
    """The best keys, or pools, of each row."""
    pool, k = c.pool or 1, c.selected
    pages, scale_pages = cache["index"], cache.get("index_scales")
    lengths = step.lengths // pool
    if step.tile == 1:
        table = step.page_table[step.tile_request]
        one_each = (q[:, None], gates[:, None], pages, table, lengths[:, None])
        found = topk_paged(*one_each, k=k, scale_pages=scale_pages, forced=c.forced, platform=selection.platform)
        return found[:, 0]
    keys = gather_keys(pages, step.key_pages)
    scales = None if scale_pages is None else gather_keys(scale_pages, step.key_pages)
    rows = RowBatch(ks=step.key_starts // pool, lengths=lengths, request=None)
    if selection.stripe_rows is None:
        return topk_rows(q, gates, keys, scales, rows, k=k, forced=c.forced, platform=selection.platform)
    return striped_topk_rows_local(
        q,
        gates,
        keys,
        scales,
        rows,
        k=k,
        forced=c.forced,
        axis=shards.axis,
        tp=shards.tp,
        stripes=StripeConfig(rows=selection.stripe_rows, merge=selection.merge),
        platform=selection.platform,
    )
