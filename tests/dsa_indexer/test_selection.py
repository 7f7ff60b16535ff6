"""Exact, deterministic selection against a stable sort in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import ForcedTokens
from dsa_indexer.topk import IMPLEMENTATIONS, select_topk
from dsa_indexer.topk.order import sortable
from tests.dsa_indexer import oracle

N, K, START = 64, 16, 3
INF, NAN = np.float32(np.inf), np.float32(np.nan)
MINUS_NAN = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
ONE = np.float32(1)


def _cases():
    rng = np.random.default_rng(5)
    noise = rng.normal(size=N).astype(np.float32)
    winners_and_ties = np.full(N, -1, np.float32)
    winners_and_ties[rng.permutation(N)[:40]] = 0.5
    winners_and_ties[np.flatnonzero(winners_and_ties == -1)[:10]] = 2
    zeros = np.where(rng.integers(0, 2, N) == 1, np.float32(-0.0), np.float32(0.0))
    subnormal = np.where(np.arange(N) % 3 == 0, np.float32(1e-42), np.float32(-1e-42))
    ulp = np.where(np.arange(N) % 2 == 0, ONE, np.nextafter(ONE, np.float32(2)))
    few_finite = np.where(np.arange(N) % 9 == 4, noise, np.float32(-INF))
    one_nan, one_minus_nan = noise.copy(), noise.copy()
    one_nan[20], one_minus_nan[20] = NAN, MINUS_NAN
    nan_among_inf = np.where(np.arange(N) % 2 == 0, MINUS_NAN, np.float32(-INF))
    return {
        "random": (noise, 60),
        "all equal": (np.full(N, 0.25, np.float32), 60),
        "zeros of both signs": (zeros, 60),
        "subnormal": (subnormal, 60),
        "all negative": (-np.abs(noise), 60),
        "one ulp apart": (ulp, 60),
        "negative, one ulp apart": (-ulp, 60),
        "infinities of both signs": (np.where(noise > 0.5, INF, np.where(noise < 0, -INF, noise)), 60),
        "fewer than K finite": (few_finite, 60),
        "all -inf": (np.full(N, -INF), 60),
        "one NaN": (one_nan, 60),
        "one NaN with its sign bit set": (one_minus_nan, 60),
        "all NaN": (np.full(N, NAN), 60),
        "NaN and -inf": (nan_among_inf, 60),
        "10 winners and 40 ties": (winners_and_ties, 60),
        "length 0": (noise, 0),
        "negative length": (noise, -1),
        "length 1": (noise, 1),
        "length K - 1": (noise, K - 1),
        "length K": (noise, K),
        "length K + 1": (noise, K + 1),
    }


CASES = _cases()


jit_select = jax.jit(select_topk, static_argnames=("k", "forced", "implementation"))


def _batch():
    """Every case is a row of one call. What lies outside a window would win if it were read."""
    scores = np.stack([row for row, _ in CASES.values()]).astype(np.float32)
    lengths = np.array([length for _, length in CASES.values()], np.int32)
    ks = np.full(len(CASES), START, np.int32)
    column = np.arange(N) - START
    outside = (column < 0) | (column >= lengths[:, None])
    canary = np.where(np.arange(N) % 2 == 0, INF, NAN)
    return np.where(outside, canary, scores).astype(np.float32), ks, lengths


def _select(scores, ks, lengths, k: int, **options) -> np.ndarray:
    return np.asarray(jit_select(*(jnp.asarray(x) for x in (scores, ks, lengths)), k=k, **options))


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def selected(request):
    batch = _batch()
    runs = [_select(*batch, K, implementation=request.param) for _ in range(3)]
    with np.errstate(invalid="ignore"):
        return runs, oracle.select(*batch, K)


def test_every_implementation_equals_a_stable_sort_each_time(selected):
    runs, expected = selected
    for m, name in enumerate(CASES):
        for run in runs:
            np.testing.assert_array_equal(run[m], expected[m], err_msg=name)


def test_rows_of_many_words_of_bits_keep_the_first_of_their_ties():
    rng = np.random.default_rng(6)
    scores = rng.integers(-3, 4, (5, 1003)).astype(np.float32)  # about 140 equal scores of each kind
    ks, lengths = np.array([0, 1, 31, 32, 500], np.int32), np.array([1003, 1000, 970, 64, 503], np.int32)
    for k in (1, 100):
        out = _select(scores, ks, lengths, k, implementation="threshold")
        np.testing.assert_array_equal(out, oracle.select(scores, ks, lengths, k))


def test_forced_tokens_come_before_all_others_even_infinite_ones():
    rng = np.random.default_rng(4)
    scores = rng.normal(size=(5, N)).astype(np.float32)
    scores[1, 20:40] = INF
    scores[2] = NAN
    ks, lengths = np.array([0, 2, 3, 5, 9], np.int32), np.array([64, 60, 50, 19, 0], np.int32)
    forced = scores.copy()
    for m, (start, length) in enumerate(zip(ks, lengths, strict=True)):
        window = forced[m, start : start + length]
        window[:] = np.nan_to_num(window, nan=-1e30, posinf=1e30)
        window[:4] = window[max(length - 3, 0) :] = INF
    out = _select(scores, ks, lengths, K, forced=ForcedTokens(first=4, last=3))
    np.testing.assert_array_equal(out, oracle.select(forced, ks, lengths, K))
    assert {0, 1, 2, 3, 57, 58, 59} <= set(out[1])


def test_more_forced_tokens_than_k_keep_the_smallest_indices():
    scores, zero, length = np.zeros((1, 40), np.float32), np.zeros(1, np.int32), np.array([40], np.int32)
    np.testing.assert_array_equal(_select(scores, zero, length, 5, forced=ForcedTokens(3, 9))[0], [0, 1, 2, 31, 32])
    with pytest.raises(ValueError, match=r"ForcedTokens.last is -1"):
        ForcedTokens(last=-1)


def test_of_10_winners_and_40_ties_the_lowest_ties_are_kept(selected):
    runs, _ = selected
    scores, length = CASES["10 winners and 40 ties"]
    window = scores[START : START + length]
    winners, ties = np.flatnonzero(window == 2), np.flatnonzero(window == 0.5)
    want = np.sort(np.concatenate([winners, ties[: K - len(winners)]]))
    np.testing.assert_array_equal(runs[0][list(CASES).index("10 winners and 40 ties")], want)


def test_fewer_keys_than_k_gives_all_of_them_and_then_minus_one():
    scores = np.random.default_rng(1).normal(size=(4, 249)).astype(np.float32)
    lengths = np.array([249, 124, 1, 0], np.int32)
    out = _select(scores, np.zeros(4, np.int32), lengths, 2048)
    np.testing.assert_array_equal(out, np.where(np.arange(2048) < lengths[:, None], np.arange(2048), -1))


def test_the_integer_image_keeps_the_order_of_the_floats():
    tiny = np.float32(1e-45)
    ascending = np.array([-INF, -3, -ONE, -tiny, 0, tiny, ONE, np.nextafter(ONE, np.float32(2)), INF], np.float32)
    image = np.asarray(jax.jit(sortable)(jnp.asarray(ascending)))
    assert (np.diff(image) > 0).all()
    same = np.asarray(jax.jit(sortable)(jnp.asarray(np.array([-0.0, 0.0, NAN, MINUS_NAN, -INF], np.float32))))
    assert same[0] == same[1]
    assert same[2] == same[3] == same[4] > np.iinfo(np.int32).min


def test_sixteen_of_a_thousand_keys_with_a_negative_nan_keep_the_rule():
    # Backends have a kernel of their own for few winners among many keys, and one ordered NaN wrongly.
    scores = np.random.default_rng(2).normal(size=(1, 1024)).astype(np.float32)
    scores[0, 500] = MINUS_NAN
    ks, lengths = np.zeros(1, np.int32), np.array([1024], np.int32)
    for implementation in ("top_k", "threshold"):
        out = _select(scores, ks, lengths, 16, implementation=implementation)
        np.testing.assert_array_equal(out, oracle.select(scores, ks, lengths, 16))
