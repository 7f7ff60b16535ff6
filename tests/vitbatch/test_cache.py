"""Who owns which pool slot."""

import numpy as np
import pytest

from vitbatch import EmbeddingCache, PoolFull

A, B, C, D = (bytes([n]) * 16 for n in range(4))


def test_entries_never_share_a_slot():
    cache = EmbeddingCache(10)
    slots = np.concatenate([cache.insert(A, 3), cache.insert(B, 5)])
    assert len(set(slots.tolist())) == 8
    assert cache.tokens_used == 8


def test_a_hit_gives_the_slots_that_were_inserted():
    cache = EmbeddingCache(10)
    slots = cache.insert(A, 3)
    np.testing.assert_array_equal(cache.lookup(A, 3), slots)
    assert cache.lookup(B, 3) is None


def test_the_least_recently_used_entry_goes_first():
    cache = EmbeddingCache(10)
    for key in (A, B, C):
        cache.insert(key, 3)
    cache.lookup(A, 3)
    cache.insert(D, 4)
    assert (A in cache, B in cache, C in cache) == (True, False, True)
    assert (cache.evictions, cache.tokens_used) == (1, 10)


def test_a_pinned_entry_stays_until_its_last_release():
    cache = EmbeddingCache(6)
    cache.insert(A, 4)
    cache.pin(A)
    cache.pin(A)
    cache.release(A)
    with pytest.raises(PoolFull, match=r"3 rows wanted, but 4 of the pool's 6 are in use"):
        cache.insert(B, 3)
    assert A in cache
    cache.release(A)
    cache.insert(B, 3)
    assert A not in cache


def test_a_full_pool_evicts_nothing():
    cache = EmbeddingCache(10)
    cache.insert(A, 4)
    cache.insert(B, 4)
    cache.pin(B)
    with pytest.raises(PoolFull):
        cache.insert(C, 7)
    assert (A in cache, cache.evictions, cache.tokens_used, cache.tokens_pinned) == (True, 0, 8, 4)


def test_an_entry_of_another_token_count_is_a_miss_and_goes():
    cache = EmbeddingCache(10)
    cache.insert(A, 4)
    assert cache.lookup(A, 5) is None
    assert A not in cache
    assert cache.tokens_used == 0


def test_an_entry_in_use_is_never_taken_for_another_token_count():
    cache = EmbeddingCache(10)
    cache.insert(A, 4)
    cache.pin(A)
    with pytest.raises(ValueError, match="names 4 rows in use but 5 were asked for"):
        cache.lookup(A, 5)


def test_a_release_too_many_is_an_error():
    cache = EmbeddingCache(10)
    cache.insert(A, 1)
    for key in (A, B):
        with pytest.raises(ValueError, match="released more often"):
            cache.release(key)


def test_slots_are_conserved_over_a_long_history():
    cache, draw, pinned = EmbeddingCache(50), np.random.default_rng(0), []
    for _ in range(400):
        key = bytes([int(draw.integers(20))]) * 16
        tokens = 1 + key[0] % 13
        if pinned and draw.random() < 0.5:
            cache.release(pinned.pop(int(draw.integers(len(pinned)))))
            continue
        try:
            if cache.lookup(key, tokens) is None:
                cache.insert(key, tokens)
        except PoolFull:
            continue
        cache.pin(key)
        pinned.append(key)
        held = [cache.lookup(k, 1 + k[0] % 13) for k in {bytes([n]) * 16 for n in range(20)} if k in cache]
        slots = np.concatenate(held)
        assert len(set(slots.tolist())) == len(slots) == cache.tokens_used
        assert cache.tokens_pinned == sum(1 + k[0] % 13 for k in set(pinned))


def test_a_miss_of_an_evicted_image_is_a_re_encode():
    cache = EmbeddingCache(6, bytes_per_token=100)
    for key, tokens in ((A, 4), (B, 4), (A, 4)):
        assert cache.lookup(key, tokens) is None
        cache.insert(key, tokens)
        cache.count(0, [key])
    assert (cache.misses, cache.evictions, cache.re_encodes) == (3, 2, 1)
    cache.count(2, [C])
    assert (cache.hits, cache.misses, cache.re_encodes) == (2, 4, 1)
    assert cache.bytes_used == 400


def test_evicted_keys_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr("vitbatch.cache._REMEMBERED", 2)
    cache = EmbeddingCache(1)
    for key in (A, B, C, D):
        cache.insert(key, 1)
    for key, again in ((A, 0), (B, 1), (C, 2)):
        cache.count(0, [key])
        assert cache.re_encodes == again


def test_a_pool_without_rows_is_refused():
    with pytest.raises(ValueError, match="the pool has 0 rows"):
        EmbeddingCache(0)
