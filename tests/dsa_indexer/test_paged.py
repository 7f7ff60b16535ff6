"""Decode over the paged cache against the packed form, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import RowBatch, gather_keys, store_keys, topk_paged, topk_rows

jit_topk = jax.jit(topk_rows, static_argnames=("k", "logits_bytes"))
jit_paged = jax.jit(topk_paged, static_argnames=("k", "logits_bytes"))
KV = (530, 77, 0, 1240)


def _cache(page: int):
    """Four requests with their keys scattered over a cache whose other slots are NaN."""
    rng = np.random.default_rng(page)
    counts = [-(-kv // page) for kv in KV]
    table = np.full((4, max(counts) + 2), 10**6, np.int32)
    free = rng.permutation(sum(counts) + 3)
    keys = [jnp.asarray(rng.normal(size=(kv, 12)), jnp.float32) for kv in KV]
    pages = jnp.full((len(free), page, 12), jnp.nan)
    for r, (count, request_keys) in enumerate(zip(counts, keys, strict=True)):
        table[r, :count], free = free[:count], free[count:]
        position = np.arange(len(request_keys))
        slots = table[r, position // page] * page + position % page
        pages = store_keys(pages, request_keys, jnp.asarray(slots, jnp.int32))
    return keys, pages, jnp.asarray(table)


@pytest.mark.parametrize(("page", "n"), [(7, 1), (64, 1), (64, 3), (16, 9)])
def test_decode_selects_the_bits_of_the_packed_form(page, n):
    keys, pages, table = _cache(page)
    rng = np.random.default_rng(n)
    q = jnp.asarray(rng.normal(size=(4, n, 3, 12)), jnp.float32)
    gates = jnp.asarray(rng.normal(size=(4, n, 3)), jnp.float32)
    lengths = jnp.asarray([np.clip(np.arange(kv - n + 1, kv + 1), 0, None) for kv in KV], jnp.int32)
    out = jit_paged(q, gates, pages, table, lengths, k=41)
    starts = np.cumsum([0, *KV[:-1]])
    packed = RowBatch(jnp.asarray(np.repeat(starts, n), jnp.int32), lengths.reshape(-1))
    want = jit_topk(q.reshape(-1, 3, 12), gates.reshape(-1, 3), jnp.concatenate(keys), None, packed, k=41)
    np.testing.assert_array_equal(out.reshape(-1, 41), want)
    assert (np.asarray(out[2]) == -1).all()


def test_a_small_score_budget_takes_requests_in_turn_and_changes_no_bit():
    _, pages, table = _cache(16)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(4, 2, 3, 12)), jnp.float32)
    gates = jnp.asarray(rng.normal(size=(4, 2, 3)), jnp.float32)
    lengths = jnp.asarray([[529, 530], [76, 77], [0, 0], [1239, 1240]], jnp.int32)
    whole = jit_paged(q, gates, pages, table, lengths, k=41)
    in_turn = jit_paged(q, gates, pages, table, lengths, k=41, logits_bytes=1)
    np.testing.assert_array_equal(in_turn, whole)


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
    untouched = store_keys(pages, keys, jnp.array([-1, 15, -(2**31)], jnp.int32))
    np.testing.assert_array_equal(untouched, pages)
    one = store_keys(pages, keys, jnp.array([-1, 14, 99], jnp.int32))
    np.testing.assert_array_equal(one[2, 4], keys[1])
    np.testing.assert_array_equal(one.reshape(15, 4)[:14], np.ones((14, 4)))


def test_stored_keys_are_read_back_page_by_page_in_the_caches_dtype():
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)), jnp.float32)
    slots = jnp.asarray(np.r_[15:20, 5:10], jnp.int32)
    pages = store_keys(jnp.zeros((4, 5, 4), jnp.bfloat16), keys, slots)
    assert pages.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gather_keys(pages, jnp.array([3, 1], jnp.int32)), keys.astype(jnp.bfloat16))


def test_a_page_id_outside_the_cache_reads_zeros():
    out = gather_keys(jnp.ones((4, 5, 3)), jnp.array([-1, 2, 4], jnp.int32))
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
