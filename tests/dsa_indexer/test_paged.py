"""Decode over the paged cache against the packed form, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import ForcedTokens, RowBatch, gather_keys, store_keys, topk_paged, topk_rows
from tests.dsa_indexer.oracle import packed_rows

jit_topk = jax.jit(topk_rows, static_argnames=("k", "forced", "logits_bytes"))
jit_paged = jax.jit(topk_paged, static_argnames=("k", "forced", "logits_bytes"))
jit_store, jit_gather = jax.jit(store_keys), jax.jit(gather_keys)
KV = (530, 77, 0, 1240)


def _cache(page: int):
    """Four requests with their keys scattered over a cache whose other slots are NaN."""
    rng = np.random.default_rng(page)
    counts = [-(-kv // page) for kv in KV]
    table = np.full((4, max(counts) + 2), 10**6, np.int32)
    free = rng.permutation(sum(counts) + 3)
    for r, pages_of_request in enumerate(np.split(free[: sum(counts)], np.cumsum(counts)[:-1])):
        table[r, : counts[r]] = pages_of_request
    keys = jnp.asarray(rng.normal(size=(sum(KV), 12)), jnp.float32)
    pages = np.full((len(free), page, 12), np.nan, np.float32)
    return keys, jit_store(pages, keys, _slots(table, KV, page)), jnp.asarray(table)


def _slots(table: np.ndarray, kv: tuple[int, ...], page: int):
    """The slot of each position of each request, one request after another."""
    request, position = np.repeat(np.arange(len(kv)), kv), np.concatenate([np.arange(length) for length in kv])
    return jnp.asarray(table[request, position // page] * page + position % page, jnp.int32)


def test_decode_selects_the_bits_of_the_packed_form():
    keys, pages, table = _cache(page=64)
    rng = np.random.default_rng(1)
    q, gates = (
        jnp.asarray(rng.normal(size=(4, 1, 3, 12)), jnp.float32),
        jnp.asarray(rng.normal(size=(4, 1, 3)), jnp.float32),
    )
    lengths = jnp.asarray(KV, jnp.int32)
    packed = RowBatch(jnp.asarray(np.cumsum([0, *KV[:-1]]), jnp.int32), lengths)
    want = jit_topk(q[:, 0], gates[:, 0], keys, None, packed, k=41)
    for logits_bytes in (256 << 20, 1):  # all requests at once, or one after another
        out = jit_paged(q, gates, pages, table, lengths[:, None], k=41, logits_bytes=logits_bytes)
        np.testing.assert_array_equal(out[:, 0], want)
    assert (np.asarray(out[2]) == -1).all()


def test_rows_that_verify_speculated_tokens_select_what_prefill_selected_for_them():
    """Nine tokens (more than a row tile) of each of two requests, once as the rows of a prefill chunk and once as rows
    over the cache, with scaled float8 keys and forced tokens."""
    kv, n, page, k, forced = (333, 90), 9, 7, 24, ForcedTokens(first=1, last=2)
    rng = np.random.default_rng(9)
    keys = jnp.asarray(rng.normal(size=(sum(kv), 12)), jnp.float8_e4m3fn)
    scales = jnp.asarray(rng.uniform(0.5, 2, sum(kv)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(2, n, 3, 12)), jnp.float8_e4m3fn)
    gates = jnp.asarray(rng.normal(size=(2, n, 3)), jnp.float32)
    packed = packed_rows((n, n), kv)
    want = jit_topk(q.reshape(-1, 3, 12), gates.reshape(-1, 3), keys, scales, packed, k=k, forced=forced)

    table = rng.permutation(2 * 50).reshape(2, 50).astype(np.int32)
    slots = _slots(table, kv, page)
    pages = jit_store(jnp.zeros((100, page, 12), keys.dtype), keys, slots)
    scale_pages = jit_store(jnp.zeros((100, page)), scales, slots)
    lengths = packed.lengths.reshape(2, n)
    out = jit_paged(q, gates, pages, jnp.asarray(table), lengths, k=k, scale_pages=scale_pages, forced=forced)
    np.testing.assert_array_equal(out.reshape(-1, k), want)


@pytest.mark.parametrize(("B", "n", "maxpages"), [(0, 1, 3), (2, 0, 3), (2, 1, 0)])
def test_nothing_to_decode_is_an_empty_selection(B, n, maxpages):
    out = topk_paged(
        jnp.ones((B, n, 2, 6)),
        jnp.ones((B, n, 2)),
        jnp.ones((5, 4, 6)),
        jnp.zeros((B, maxpages), jnp.int32),
        jnp.zeros((B, n), jnp.int32),
        k=3,
    )
    assert out.shape == (B, n, 3)
    assert (np.asarray(out) == -1).all()


def test_storing_to_minus_one_or_past_the_end_writes_nothing():
    pages = jnp.ones((3, 5, 4))
    keys = jnp.arange(2, 14, dtype=jnp.float32).reshape(3, 4)
    untouched = jit_store(pages, keys, jnp.array([-1, 15, -(2**31)], jnp.int32))
    np.testing.assert_array_equal(untouched, pages)
    one = jit_store(pages, keys, jnp.array([-1, 14, 99], jnp.int32))
    np.testing.assert_array_equal(one[2, 4], keys[1])
    np.testing.assert_array_equal(one.reshape(15, 4)[:14], np.ones((14, 4)))


def test_stored_keys_are_read_back_page_by_page_in_the_caches_dtype():
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)), jnp.float32)
    slots = jnp.asarray(np.r_[15:20, 5:10], jnp.int32)
    pages = jit_store(jnp.zeros((4, 5, 4), jnp.bfloat16), keys, slots)
    assert pages.dtype == jnp.bfloat16
    np.testing.assert_array_equal(jit_gather(pages, jnp.array([3, 1], jnp.int32)), keys.astype(jnp.bfloat16))


def test_a_page_id_outside_the_cache_reads_zeros():
    out = jit_gather(jnp.ones((4, 5, 3)), jnp.array([-1, 2, 4], jnp.int32))
    np.testing.assert_array_equal(out.reshape(3, 5, 3)[:, 0, 0], [0, 1, 0])


def test_a_cache_whose_slots_do_not_fit_int32_is_refused():
    def store(num_pages: int):
        shapes = [
            jax.ShapeDtypeStruct((num_pages, 64, 4), jnp.bfloat16),
            jax.ShapeDtypeStruct((3, 4), jnp.bfloat16),
            jax.ShapeDtypeStruct((3,), jnp.int32),
        ]
        return jax.eval_shape(store_keys, *shapes)

    assert store(2**25 - 1).shape == (2**25 - 1, 64, 4)
    with pytest.raises(ValueError, match="2147483648 slots"):
        store(2**25)
