"""What holds for any rows, stripes and budgets."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsa_indexer import ForcedTokens, RowBatch, to_paged, to_ragged, topk_rows
from dsa_indexer.chunks import chunk_of
from dsa_indexer.stripes import imbalance, owner, pairs_per_device, rounds
from dsa_indexer.topk import select_topk
from tests.dsa_indexer import oracle

some = settings(derandomize=True, database=None, deadline=None, max_examples=25)
many = settings(some, max_examples=100)

M, N, K = 11, 70, 9
jit_topk = jax.jit(topk_rows, static_argnames=("k", "forced"))
jit_select = jax.jit(select_topk, static_argnames=("k", "implementation"))
jit_paged, jit_ragged = jax.jit(to_paged, static_argnums=3), jax.jit(to_ragged)
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")])
WINDOWS = hnp.arrays(np.int32, (M, 2), elements=st.integers(0, N))


def _rows(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ks and lengths of windows that end within the keys."""
    return windows.min(1), windows.max(1) - windows.min(1)


@some
@given(scores=hnp.arrays(np.float32, (M, N), elements=FLOATS), windows=WINDOWS)
def test_any_scores_are_selected_like_a_stable_sort(scores, windows):
    ks, lengths = _rows(windows)
    with np.errstate(invalid="ignore"):
        want = oracle.select(scores, ks, lengths, K)
    out = jit_select(jnp.asarray(scores), jnp.asarray(ks), jnp.asarray(lengths), k=K)
    np.testing.assert_array_equal(out, want)


@some
@given(seed=st.integers(0, 2**32 - 1), windows=WINDOWS)
def test_any_windows_select_what_numpy_does_and_every_index_is_in_its_window(seed, windows):
    ks, lengths = _rows(windows)
    q, gates, keys = oracle.exact_inputs(np.random.default_rng(seed), M, N)
    out = np.asarray(
        jit_topk(q, gates, keys, None, RowBatch(jnp.asarray(ks), jnp.asarray(lengths)), k=K, forced=ForcedTokens(1, 2))
    )
    scores = oracle.force(oracle.scores_of(q, gates, keys), ks, lengths, 1, 2)
    np.testing.assert_array_equal(out, oracle.select(scores, ks, lengths, K))
    np.testing.assert_array_equal((out >= 0).sum(1), np.minimum(lengths, K))
    assert (out < np.maximum(lengths, 1)[:, None]).all()


@many
@given(
    num_rows=st.integers(0, 400),
    stripe=st.integers(1, 70),
    tp=st.integers(1, 9),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_any_stripes_own_each_row_once_and_count_its_pairs_once(num_rows, stripe, tp, data, seed):
    lengths = np.random.default_rng(seed).integers(-1, 1000, num_rows)
    owners = owner(np.arange(num_rows), stripe, tp)
    mask = owners == np.arange(tp)[:, None]
    assert (mask.sum(0) == 1).all()
    assert mask.sum(1).max(initial=0) <= rounds(num_rows, stripe, tp) * stripe
    pairs = np.where(mask, np.maximum(lengths, 0), 0).sum(1)
    np.testing.assert_array_equal(pairs_per_device(lengths, stripe, tp), pairs)
    assert 1 <= imbalance(lengths, stripe, tp) <= tp
    if num_rows:  # who owns a row does not change when rows are added behind it
        prefix = data.draw(st.integers(1, num_rows))
        np.testing.assert_array_equal(owner(np.arange(prefix), stripe, tp), owners[:prefix])


@many
@given(
    count=st.integers(0, 10**6),
    multiple=st.integers(1, 64),
    item_bytes=st.integers(1, 10**7),
    budget=st.integers(1, 2**40),
)
def test_any_budget_gives_chunks_of_whole_tiles_within_it(count, multiple, item_bytes, budget):
    chunk = chunk_of(count, multiple=multiple, item_bytes=item_bytes, budget=budget)
    assert chunk % multiple == 0
    assert chunk >= multiple
    assert chunk * item_bytes <= budget or chunk == multiple
    assert chunk < count + multiple or count == 0
    whole = -(-count // multiple) * multiple
    assert -whole % chunk < multiple * max(-(-whole // chunk), 1)  # chunks as equal as tiles allow


@some
@given(seed=st.integers(0, 2**32 - 1))
def test_any_selection_goes_to_slots_and_columns_without_moving_minus_one(seed):
    rng, page = np.random.default_rng(seed), 5
    counts = rng.integers(0, K + 1, M)
    idx = np.where(np.arange(K) < counts[:, None], np.sort(rng.integers(0, 8 * page, (M, K)), 1), -1).astype(np.int32)
    table = rng.integers(-1, 50, (3, 8)).astype(np.int32)
    request, offsets = rng.integers(0, 3, M).astype(np.int32), rng.integers(0, 10**6, M).astype(np.int32)
    slots = np.asarray(jit_paged(*map(jnp.asarray, (idx, request, table)), page))
    columns = np.asarray(jit_ragged(jnp.asarray(idx), jnp.asarray(offsets)))
    for m, row in enumerate(idx):
        for j, position in enumerate(row):
            found = table[request[m], position // page] if position >= 0 else -1
            assert slots[m, j] == (found * page + position % page if found >= 0 else -1)
            assert columns[m, j] == (position + offsets[m] if position >= 0 else -1)
