"""The selection kernels against a full sort, bit by bit, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer.tiles import SelectTile
from dsa_indexer.topk import IMPLEMENTATIONS, select_topk
from dsa_indexer.topk.order import NOTHING_FORCED, ForcedTokens
from dsa_indexer.topk.triton import LARGEST_K, select_topk_triton
from tests.dsa_indexer import oracle
from tests.kernels.rows import hard_rows, right_selection
from vitstripe.platform import Platform, platform_of

CPU = Platform("cpu", "", "")
# A small sample misleads more often, so that the second passes are tested, too.
TILE = SelectTile(sample=64, read=128, guess_warps=4, warps=4, pick_warps=4, repair_rows=3, repair_read=64)
NAMES = list(hard_rows(64))


_select = jax.jit(select_topk_triton, static_argnames=("k", "forced", "platform", "tile", "interpret"))


def select(scores, ks, lengths, k, forced=NOTHING_FORCED, **options) -> np.ndarray:
    return np.asarray(_select(*(jnp.asarray(x) for x in (scores, ks, lengths)), k=k, forced=forced, **options))


def interpreted(scores, ks, lengths, k, forced=NOTHING_FORCED) -> np.ndarray:
    return select(scores, ks, lengths, k, forced, platform=CPU, tile=TILE, interpret=True)


def assert_same_rows(got: np.ndarray, want: np.ndarray, names) -> None:
    wrong = [name for name, g, w in zip(names, got, want, strict=True) if not np.array_equal(g, w)]
    assert not wrong


@pytest.mark.parametrize(
    ("k", "forced"), [(1, NOTHING_FORCED), (37, NOTHING_FORCED), (150, NOTHING_FORCED), (37, ForcedTokens(2, 5))]
)
def test_any_row_is_selected_as_by_a_full_sort(k, forced):
    scores = np.stack(list(hard_rows(1003).values()))
    ks = (np.arange(len(scores)) * 3 % 11).astype(np.int32)
    lengths = (1003 - ks - np.arange(len(scores)) % 5).astype(np.int32)
    scores[np.arange(1003) < ks[:, None]] = 1e30  # not of the window
    want = right_selection(scores, ks, lengths, k, forced)
    assert_same_rows(interpreted(scores, ks, lengths, k, forced), want, NAMES)


def test_rows_of_few_keys_keep_them_all():
    k = 150
    lengths = np.array([0, -3, 1, 149, 150, 151, 255, 256, 257, 511, 512, 513], np.int32)
    scores = np.random.default_rng(0).normal(size=(len(lengths), 600)).astype(np.float32)
    ks = np.arange(len(lengths), dtype=np.int32)
    got = interpreted(scores, ks, lengths, k)
    np.testing.assert_array_equal(got, right_selection(scores, ks, lengths, k, NOTHING_FORCED))
    np.testing.assert_array_equal(got[4], np.arange(150))
    assert (got[:2] == -1).all()


def test_scores_outside_the_window_do_not_matter():
    scores = np.random.default_rng(1).normal(size=(2, 1003)).astype(np.float32)
    ks, lengths = np.array([5, 100], np.int32), np.array([900, 333], np.int32)
    clean = interpreted(scores, ks, lengths, 37)
    column = np.arange(1003)
    for poison in (np.nan, np.inf):
        scores[(column < ks[:, None]) | (column >= (ks + lengths)[:, None])] = poison
        np.testing.assert_array_equal(interpreted(scores, ks, lengths, 37), clean)


def test_a_row_is_selected_the_same_in_every_launch():
    scores = np.stack(list(hard_rows(1003).values()))
    ks, lengths = np.zeros(len(scores), np.int32), np.full(len(scores), 1003, np.int32)
    together = interpreted(scores, ks, lengths, 37)
    for rows in ([4, 5], [7, 2]):
        np.testing.assert_array_equal(interpreted(scores[rows], ks[rows], lengths[rows], 37), together[rows])


def test_without_rows_or_keys_nothing_is_selected():
    assert interpreted(np.zeros((0, 9), np.float32), np.zeros(0, np.int32), np.zeros(0, np.int32), 4).shape == (0, 4)
    assert (interpreted(np.zeros((2, 0), np.float32), np.zeros(2, np.int32), np.zeros(2, np.int32), 4) == -1).all()


@pytest.mark.parametrize("k", [0, LARGEST_K + 1])
def test_other_k_are_refused_by_value(k):
    with pytest.raises(ValueError, match=f"k is {k}"):
        interpreted(np.ones((1, 9), np.float32), np.zeros(1, np.int32), np.full(1, 9, np.int32), k)


def test_tiles_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="sample is 100"):
        SelectTile(100, 128, 4, 4, 4)
    with pytest.raises(ValueError, match="ranks within a step have 16 bits"):
        SelectTile(128, 1 << 16, 4, 4, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "forced"),
    [*((k, NOTHING_FORCED) for k in (77, 512, 1024, 2048, LARGEST_K)), (2048, ForcedTokens(4, 900))],
)
def test_on_a_gpu_any_row_is_selected_as_by_a_full_sort(k, forced):
    num_keys = 100_003
    scores = np.stack(list(hard_rows(num_keys).values()))
    ks = (np.arange(len(scores)) * 3 % 11).astype(np.int32)
    lengths = (num_keys - ks - np.arange(len(scores)) % 5).astype(np.int32)
    platform = platform_of(jax.devices()[0])
    # Freed memory of the size of the result holds a column that no row has.
    jnp.full((len(scores), k), 123_456_789, jnp.int32).block_until_ready().delete()
    got = select(scores, ks, lengths, k, forced, platform=platform)
    assert_same_rows(got, right_selection(scores, ks, lengths, k, forced), NAMES)
    np.testing.assert_array_equal(select(scores, ks, lengths, k, forced, platform=platform), got)


@pytest.mark.gpu
def test_on_a_gpu_rows_of_any_length_are_selected_as_by_a_full_sort():
    k = 2048
    lengths = np.array([0, -1, 1, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 20000, 70000], np.int32)
    scores = np.random.default_rng(2).normal(size=(len(lengths), 70_020)).astype(np.float32)
    ks = np.arange(len(lengths), dtype=np.int32)
    got = select(scores, ks, lengths, k, platform=platform_of(jax.devices()[0]))
    np.testing.assert_array_equal(got, right_selection(scores, ks, lengths, k, NOTHING_FORCED))


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "num_keys"), [(16, 64), (2048, 50_003)])
def test_on_a_gpu_equal_scores_at_the_last_place_are_taken_alike_a_hundred_times(k, num_keys):
    """Some clear winners and many more equals than places are left: a race would pick others now and then."""
    rows, draw = 64, np.random.default_rng(3)
    scores = np.full((rows, num_keys), -1, np.float32)
    for row in scores:
        chosen = draw.permutation(num_keys)
        row[chosen[: num_keys * 3 // 4]] = 0.5
        row[chosen[: k // 2 + 2]] = 2
    ks, lengths = np.zeros(rows, np.int32), np.full(rows, num_keys, np.int32)
    want = right_selection(scores, ks, lengths, k, NOTHING_FORCED)
    for _ in range(100):
        np.testing.assert_array_equal(select(scores, ks, lengths, k, platform=platform_of(jax.devices()[0])), want)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize(("k", "num_keys"), [(16, 1024), (3, 1500), (16, 40_000)])
def test_on_a_gpu_few_of_many_keys_are_selected_right_by_every_implementation(k, num_keys, implementation):
    """Where few are wanted of many, XLA has a kernel of its own, and one ordered a NaN with its sign bit wrongly."""
    scores = np.stack(list(hard_rows(num_keys).values()))
    scores = np.concatenate([scores, np.random.default_rng(4).normal(size=(3, num_keys)).astype(np.float32)])
    minus_nan = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
    scores[-3, num_keys // 2], scores[-2, 0], scores[-1, ::2] = minus_nan, minus_nan, minus_nan
    ks, lengths = np.zeros(len(scores), np.int32), np.full(len(scores), num_keys, np.int32)
    choose = jax.jit(lambda *rows: select_topk(*rows, k=k, implementation=implementation))
    got = np.asarray(choose(*(jnp.asarray(x) for x in (scores, ks, lengths))))
    with np.errstate(invalid="ignore"):  # numpy minds some of the NaN
        assert_same_rows(got, oracle.select(scores, ks, lengths, k), [*NAMES, "one NaN", "the first", "every other"])
