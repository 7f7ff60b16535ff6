"""Scores and selection together: exact against numpy, and the same bits however a row is computed."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import RowBatch, to_paged, topk_rows
from dsa_indexer.chunks import chunk_of
from dsa_indexer.scores import row_scores
from tests.dsa_indexer import oracle
from tests.helpers import relative_error

pytestmark = pytest.mark.usefixtures("fully_optimised")

jit_topk = jax.jit(topk_rows, static_argnames=("k", "logits_bytes"))
jit_scores = jax.jit(row_scores)


@pytest.fixture(scope="module")
def pack():
    """3 requests of 5, 1 and 9 new tokens on 40, 600 and 77 keys, in one pack of 15 rows and 717 keys."""
    rng = np.random.default_rng(0)
    rows = oracle.packed_rows([5, 1, 9], [40, 600, 77])
    return (*oracle.exact_inputs(rng, M=15, N=717), rows)


def test_selection_over_packed_requests_equals_numpy(pack):
    q, gates, keys, rows = pack
    out = jit_topk(q, gates, keys, None, rows, k=21)
    want = oracle.select(oracle.scores_of(q, gates, keys), rows.ks, rows.lengths, 21)
    np.testing.assert_array_equal(out, want)


def test_key_scales_multiply_the_scores_of_their_float8_keys(pack):
    q, gates, keys, rows = pack
    scales = np.float32(2.0) ** np.random.default_rng(3).integers(-3, 4, keys.shape[0])
    q8, keys8 = q.astype(jnp.float8_e4m3fn), keys.astype(jnp.float8_e4m3fn)  # small integers: nothing is rounded
    out = jit_topk(q8, gates, keys8, jnp.asarray(scales), rows, k=21)
    want = oracle.select(oracle.scores_of(q, gates, keys) * scales, rows.ks, rows.lengths, 21)
    np.testing.assert_array_equal(out, want)


def test_rows_of_at_most_k_keys_take_them_all_and_are_not_scored(pack):
    q, gates, keys, rows = pack
    # Keys of the first request are NaN. It has 40, and k is 40: they are selected without being looked at.
    poisoned = keys.at[:40].set(jnp.nan)
    out = np.asarray(jit_topk(q, gates, poisoned, None, rows, k=40))
    short = np.asarray(rows.lengths) <= 40
    assert short.tolist() == [True] * 5 + [False] * 10
    np.testing.assert_array_equal(out[short], np.where(np.arange(40) < rows.lengths[short, None], np.arange(40), -1))
    want = oracle.select(oracle.scores_of(q, gates, keys), rows.ks, rows.lengths, 40)
    np.testing.assert_array_equal(out[~short], want[~short])
    nothing = jit_scores(*(jnp.asarray(x)[:8] for x in (q, gates)), keys, None, *_all_keys(8, 0))
    assert (np.asarray(nothing) == 0).all()


def test_keys_outside_a_window_are_never_scored_into_it(pack):
    q, gates, keys, rows = pack
    only_second = RowBatch(rows.ks, jnp.where(rows.request == 1, rows.lengths, 0), rows.request)
    before = jit_topk(q, gates, keys, None, only_second, k=21)
    poisoned = keys.at[:40].set(jnp.nan).at[640:].set(1e30)
    after = jit_topk(q, gates, poisoned, None, only_second, k=21)
    np.testing.assert_array_equal(after, before)
    assert (np.asarray(before)[np.asarray(rows.request) != 1] == -1).all()


def test_row_chunks_carry_their_own_requests_and_windows(pack):
    q, gates, keys, rows = pack
    whole = jit_topk(q, gates, keys, None, rows, k=21)
    chunked = jit_topk(q, gates, keys, None, rows, k=21, logits_bytes=1)
    np.testing.assert_array_equal(chunked, whole)
    table = jnp.asarray(np.random.default_rng(4).permutation(99).reshape(3, -1)[:, :30].astype(np.int32))
    slots = np.asarray(to_paged(chunked, rows.request, table, 20))
    for m in range(15):
        chosen = np.asarray(whole[m])[np.asarray(whole[m]) >= 0]
        want = np.asarray(table)[rows.request[m], chosen // 20] * 20 + chosen % 20
        np.testing.assert_array_equal(slots[m, : len(chosen)], want)


def test_the_needle_at_the_start_is_found_among_thousands_of_exact_zeros():
    N, D = 3001, 10
    keys = np.full((N, D), -1, np.float32)
    keys[0] = 1
    q, gates = jnp.ones((9, 2, D)), jnp.ones((9, 2))
    rows = RowBatch(jnp.zeros(9, jnp.int32), jnp.arange(N - 8, N + 1, dtype=jnp.int32))
    out = np.asarray(jit_topk(q, gates, jnp.asarray(keys), None, rows, k=50))
    np.testing.assert_array_equal(out, np.tile(np.arange(50), (9, 1)))
    flipped = np.asarray(jit_topk(q, gates, jnp.asarray(keys[::-1].copy()), None, rows, k=50))
    np.testing.assert_array_equal(flipped[-1], [*range(49), N - 1])
    np.testing.assert_array_equal(flipped[-2], np.arange(50))


@pytest.fixture(scope="module")
def noise():
    rng = np.random.default_rng(7)
    q, gates, keys = rng.normal(size=(40, 5, 24)), rng.normal(size=(40, 5)), rng.normal(size=(1100, 24))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, gates, keys))


def _all_keys(num_rows: int, num_keys: int):
    return jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, num_keys, jnp.int32)


def test_the_bits_of_a_score_do_not_depend_on_the_rows_beside_it(noise):
    q, gates, keys = noise
    whole = oracle.bits(jit_scores(q, gates, keys, None, *_all_keys(40, 1100)))
    alone = jit_scores(q[16:24], gates[16:24], keys, None, *_all_keys(8, 1100))
    np.testing.assert_array_equal(oracle.bits(alone), whole[16:24])
    order = np.random.default_rng(8).permutation(40)
    mixed = jit_scores(q[order], gates[order], keys, None, *_all_keys(40, 1100))
    np.testing.assert_array_equal(oracle.bits(mixed), whole[order])


def test_the_bits_of_a_score_do_not_depend_on_the_number_of_keys(noise):
    (q, gates, keys), num_keys = noise, 513
    whole = oracle.bits(jit_scores(q, gates, keys, None, *_all_keys(40, 1100)))
    part = jit_scores(q[:8], gates[:8], keys[:num_keys], None, *_all_keys(8, num_keys))
    np.testing.assert_array_equal(oracle.bits(part), whole[:8, :num_keys])


def test_the_bits_of_a_score_do_not_depend_on_where_its_key_lies(noise):
    q, gates, keys = noise
    whole = oracle.bits(jit_scores(q, gates, keys, None, *_all_keys(40, 1100)))
    moved = jit_scores(q, gates, jnp.roll(keys, 301, axis=0), None, *_all_keys(40, 1100))
    np.testing.assert_array_equal(oracle.bits(moved), np.roll(whole, 301, axis=1))


@pytest.mark.parametrize("rows", [[39, 0, 17], list(range(40))[::-1]], ids=["three", "reversed"])
def test_a_selection_does_not_depend_on_the_rows_beside_it(noise, rows):
    q, gates, keys = noise
    batch = RowBatch(jnp.arange(40, dtype=jnp.int32), jnp.arange(40, dtype=jnp.int32) * 25 + 30)
    whole = np.asarray(jit_topk(q, gates, keys, None, batch, k=33))
    take = jnp.asarray(rows)
    part = jit_topk(q[take], gates[take], keys, None, jax.tree.map(lambda x: x[take], batch), k=33)
    np.testing.assert_array_equal(part, whole[rows])


# (dtype of q, dtype of the keys, D)
FAMILIES = [
    (jnp.float32, jnp.float32, 128),
    (jnp.bfloat16, jnp.bfloat16, 64),
    (jnp.float8_e4m3fn, jnp.float8_e4m3fn, 128),
    (jnp.float8_e4m3fnuz, jnp.float8_e4m3fnuz, 32),
    (jnp.bfloat16, jnp.float8_e4m3fn, 64),
]


@pytest.mark.parametrize(("q_dtype", "key_dtype", "D"), FAMILIES)
def test_scores_are_right_and_repeat_for_each_dtype_and_head_dimension(q_dtype, key_dtype, D):
    rng = np.random.default_rng(D)
    q, keys = jnp.asarray(rng.normal(size=(8, 3, D)), q_dtype), jnp.asarray(rng.normal(size=(70, D)), key_dtype)
    gates = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    runs = [jit_scores(q, gates, keys, None, *_all_keys(8, 70)) for _ in range(3)]
    # Short inputs are exact in float64 too; all accumulate in float32.
    exact = oracle.scores_of(q.astype(jnp.float32), gates, keys.astype(jnp.float32))
    assert relative_error(runs[0], exact) < 1e-6
    for run in runs[1:]:
        np.testing.assert_array_equal(oracle.bits(run), oracle.bits(runs[0]))


@pytest.mark.parametrize(("M", "N"), [(0, 30), (5, 0), (0, 0)])
def test_no_rows_or_no_keys_is_an_empty_selection(M, N):
    out = topk_rows(
        jnp.ones((M, 2, 6)), jnp.ones((M, 2)), jnp.ones((N, 6)), None, RowBatch(*[jnp.zeros(M, jnp.int32)] * 2), k=4
    )
    assert out.shape == (M, 4)
    assert out.dtype == jnp.int32
    assert (np.asarray(out) == -1).all()


def test_the_budget_sets_the_rows_of_a_chunk():
    chunk = partial(chunk_of, multiple=8, item_bytes=4 * 131072)
    assert chunk(16384, budget=256 << 20) == 512
    assert chunk(16384, budget=(256 << 20) - 1) == 504
    assert chunk(16385, budget=256 << 20) == 504  # 33 chunks either way, so they are made equal
    assert chunk(16385, budget=1) == 8
    assert chunk(20, budget=256 << 20) == 24
    # 3 tiles over a budget of 2: two chunks of 2 tiles, not one of 3.
    assert chunk(20, budget=16 * 4 * 131072) == 16
    assert chunk(0, budget=1) == 8


@pytest.mark.parametrize("num_keys", [8, 23_170, 131_072, 1 << 20])
def test_a_chunk_stays_below_2_gib_whatever_the_budget(num_keys):
    for rows in (8, 16_385, 23_170, 1 << 20):
        chunk = chunk_of(rows, multiple=8, item_bytes=4 * num_keys, budget=1 << 50)
        assert chunk == -(-rows // 8) * 8 or (1 << 30) < chunk * 4 * num_keys < (1 << 31)
        assert chunk * 4 * num_keys < 1 << 31


def test_scores_past_2_to_the_31_elements_are_never_one_array():
    """So no offset within an array can leave int32, whatever the rows times the keys are."""
    M, N, H, D, budget = 16385, 131072, 2, 8, 64 << 20
    assert M * N > 2**31

    def abstract(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = RowBatch(abstract(M, dtype=jnp.int32), abstract(M, dtype=jnp.int32))
    args = (abstract(M, H, D), abstract(M, H), abstract(N, D), None, rows)
    text = jit_topk.lower(*args, k=64, logits_bytes=budget).as_text()
    sizes = {
        int(np.prod([int(n) for n in dims.split("x")], dtype=np.int64))
        for dims in re.findall(r"tensor<((?:\d+x)*\d+)x[a-z]+\d+>", text)
    }
    assert max(sizes) <= budget // 4
    assert jax.eval_shape(partial(topk_rows, k=64), *args).shape == (M, 64)


def test_wrong_arguments_are_named(noise):
    q, gates, keys = noise
    rows = RowBatch(*_all_keys(40, 1100))
    with pytest.raises(ValueError, match="k is 0"):
        topk_rows(q, gates, keys, None, rows, k=0)
    with pytest.raises(ValueError, match="logits_bytes is 0"):
        topk_rows(q, gates, keys, None, rows, k=3, logits_bytes=0)
    with pytest.raises(ValueError, match=r"RowBatch.lengths is int32\[39\]; with 40 query rows"):
        topk_rows(q, gates, keys, None, RowBatch(rows.ks, rows.lengths[:39]), k=3)
