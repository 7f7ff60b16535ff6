"""Token choice on the device against its definition."""

import jax
import numpy as np
import pytest

from serving.sampling import SampleArgs, sample

V = 37


def args(rows, temperature=0.0, top_p=1.0, seed=0, index=0):
    full = lambda value, dtype: np.full(rows, value, dtype)  # noqa: E731
    return SampleArgs(
        full(temperature, np.float32), full(top_p, np.float32), full(seed, np.uint32), full(index, np.int32)
    )


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(3).normal(size=(5, V)).astype(np.float32) * 3


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_id_of_equals(logits):
    tied = logits.copy()
    tied[2, [9, 30]] = tied[2].max() + 1
    tokens = np.asarray(jax.jit(sample)(tied, args(5)))
    np.testing.assert_array_equal(tokens, tied.argmax(-1))
    assert tokens[2] == 9


def test_draws_follow_the_softmax(logits):
    rows = 4000
    spread = SampleArgs(
        np.full(rows, 1.5, np.float32),
        np.ones(rows, np.float32),
        np.arange(rows, dtype=np.uint32),
        np.zeros(rows, np.int32),
    )
    tokens = np.asarray(jax.jit(sample)(np.tile(logits[:1], (rows, 1)), spread))
    expected = np.exp(logits[0] / 1.5)
    expected /= expected.sum()
    observed = np.bincount(tokens, minlength=V) / rows
    assert np.abs(observed - expected).max() < 4 * np.sqrt(0.25 / rows)


def test_top_p_keeps_the_smallest_set_that_reaches_it(logits):
    order = np.argsort(-logits[1])
    p = np.exp(logits[1] - logits[1].max())
    p = (p / p.sum())[order]
    kept = set(order[: int((np.cumsum(p) - p < 0.7).sum())].tolist())
    rows = 500
    spread = SampleArgs(
        np.ones(rows, np.float32),
        np.full(rows, 0.7, np.float32),
        np.arange(rows, dtype=np.uint32),
        np.arange(rows, dtype=np.int32),
    )
    assert set(np.asarray(jax.jit(sample)(np.tile(logits[1:2], (rows, 1)), spread)).tolist()) == kept
    nothing_left = args(5, temperature=1.0, top_p=0.0)
    np.testing.assert_array_equal(np.asarray(jax.jit(sample)(logits, nothing_left)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_minus_one_and_leaves_the_others(logits, temperature, poison):
    poisoned = logits.copy()
    poisoned[3, 7] = poison
    clean = np.asarray(jax.jit(sample)(logits, args(5, temperature)))
    tokens = np.asarray(jax.jit(sample)(poisoned, args(5, temperature)))
    assert tokens[3] == -1
    np.testing.assert_array_equal(np.delete(tokens, 3), np.delete(clean, 3))


def test_seed_and_index_decide_the_draw_and_neighbours_do_not(logits):
    whole = SampleArgs(
        np.array([1, 0, 2, 1, 1], np.float32),
        np.ones(5, np.float32),
        np.array([4, 5, 6, 7, 4], np.uint32),
        np.array([0, 0, 3, 9, 1], np.int32),
    )
    together = np.asarray(jax.jit(sample)(logits, whole))
    for row in range(5):
        one = jax.tree.map(lambda a, row=row: a[row : row + 1], whole)
        assert np.asarray(jax.jit(sample)(logits[row : row + 1], one))[0] == together[row]
    assert together[1] == logits[1].argmax()
