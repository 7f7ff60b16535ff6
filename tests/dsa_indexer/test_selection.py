"""Exact, deterministic selection against a stable sort in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer.topk import select_topk
from dsa_indexer.topk.reference import sortable
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


@pytest.fixture(scope="module")
def selected():
    """Every case is a row of one call. What lies outside a window would win if it were read."""
    scores = np.stack([row for row, _ in CASES.values()]).astype(np.float32)
    lengths = np.array([length for _, length in CASES.values()], np.int32)
    ks = np.full(len(CASES), START, np.int32)
    column = np.arange(N) - START
    outside = (column < 0) | (column >= lengths[:, None])
    canary = np.where(np.arange(N) % 2 == 0, INF, NAN)
    scores = np.where(outside, canary, scores).astype(np.float32)
    run = jax.jit(select_topk, static_argnames="k")
    runs = [np.asarray(run(jnp.asarray(scores), jnp.asarray(ks), jnp.asarray(lengths), k=K)) for _ in range(3)]
    with np.errstate(invalid="ignore"):
        expected = oracle.select(scores, ks, lengths, K)
    return runs, expected


@pytest.mark.parametrize("name", CASES)
def test_selection_equals_a_stable_sort(name, selected):
    runs, expected = selected
    m = list(CASES).index(name)
    for run in runs:
        np.testing.assert_array_equal(run[m], expected[m])


def test_of_10_winners_and_40_ties_the_lowest_ties_are_kept(selected):
    runs, _ = selected
    scores, length = CASES["10 winners and 40 ties"]
    window = scores[START : START + length]
    winners, ties = np.flatnonzero(window == 2), np.flatnonzero(window == 0.5)
    want = np.sort(np.concatenate([winners, ties[: K - len(winners)]]))
    np.testing.assert_array_equal(runs[0][list(CASES).index("10 winners and 40 ties")], want)


@pytest.mark.parametrize("num_keys", [1, 249])
def test_fewer_keys_than_k_gives_all_of_them_and_then_minus_one(num_keys):
    scores = jnp.asarray(np.random.default_rng(1).normal(size=(2, num_keys)), jnp.float32)
    lengths = jnp.array([num_keys, num_keys // 2], jnp.int32)
    out = np.asarray(select_topk(scores, jnp.zeros(2, jnp.int32), lengths, k=2048))
    assert out.shape == (2, 2048)
    for row, length in zip(out, lengths, strict=True):
        np.testing.assert_array_equal(row[:length], np.arange(length))
        assert (row[length:] == -1).all()


def test_the_integer_image_keeps_the_order_of_the_floats():
    tiny = np.float32(1e-45)
    ascending = np.array([-INF, -3, -ONE, -tiny, 0, tiny, ONE, np.nextafter(ONE, np.float32(2)), INF], np.float32)
    image = np.asarray(sortable(jnp.asarray(ascending)))
    assert (np.diff(image) > 0).all()
    same = np.asarray(sortable(jnp.asarray(np.array([-0.0, 0.0, NAN, MINUS_NAN, -INF], np.float32))))
    assert same[0] == same[1]
    assert same[2] == same[3] == same[4] > np.iinfo(np.int32).min


def test_sixteen_of_a_thousand_keys_with_a_negative_nan_keep_the_rule():
    # Backends have a kernel of their own for few winners among many keys, and one ordered NaN wrongly.
    scores = np.random.default_rng(2).normal(size=(1, 1024)).astype(np.float32)
    scores[0, 500] = MINUS_NAN
    ks, lengths = np.zeros(1, np.int32), np.array([1024], np.int32)
    out = select_topk(jnp.asarray(scores), jnp.asarray(ks), jnp.asarray(lengths), k=16)
    np.testing.assert_array_equal(out, oracle.select(scores, ks, lengths, 16))
