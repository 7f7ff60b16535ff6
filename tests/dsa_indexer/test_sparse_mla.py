"""Latent attention over selected slots against a dense softmax in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import sparse_mla
from tests.helpers import relative_error

T, H, C, V, SLOTS, K = 21, 3, 14, 10, 57, 9
SCALE = 0.3
jit_mla = jax.jit(sparse_mla, static_argnames=("scale", "value_dim", "row_block"))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(T, H, C)).astype(np.float32) * 2
    kv = rng.normal(size=(SLOTS, C)).astype(np.float32)
    # Slot 0 and the last slot are selected by nobody.
    indices = np.stack([1 + rng.permutation(SLOTS - 2)[:K] for _ in range(T)]).astype(np.int32)
    for t in range(T):
        indices[t, K - t % 4 :] = -1
    indices[4] = -1
    return q, kv, indices


def _dense(q, kv, indices):
    out = np.zeros((T, H, V))
    for t in range(T):
        chosen = kv[indices[t][indices[t] >= 0]].astype(np.float64)
        if len(chosen):
            s = q[t].astype(np.float64) @ chosen.T * SCALE
            p = np.exp(s - s.max(-1, keepdims=True))
            out[t] = (p / p.sum(-1, keepdims=True)) @ chosen[:, :V]
    return out


@pytest.mark.parametrize("row_block", [1, 16, 100])
def test_the_output_is_the_softmax_over_the_selected_slots(case, row_block):
    out = jit_mla(*map(jnp.asarray, case), scale=SCALE, value_dim=V, row_block=row_block)
    assert out.shape == (T, H, V)
    assert relative_error(out, _dense(*case)) < 1e-6


def test_a_row_without_keys_gives_zero(case):
    out = jit_mla(*map(jnp.asarray, case), scale=SCALE, value_dim=V)
    assert (np.asarray(out[4]) == 0).all()


def test_where_every_key_is_selected_prefill_and_decode_equal_dense_attention():
    rng = np.random.default_rng(3)
    q, kv = rng.normal(size=(T, H, C)).astype(np.float32), rng.normal(size=(T, C)).astype(np.float32)
    causal = np.where(np.arange(T) <= np.arange(T)[:, None], np.arange(T), -1).astype(np.int32)
    scores = np.einsum("thc,jc->thj", q, kv).astype(np.float64) * SCALE
    scores = np.where(np.tril(np.ones((T, T), bool))[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    dense = np.einsum("thj,jv->thv", weights / weights.sum(-1, keepdims=True), kv[:, :V].astype(np.float64))
    prefill = jit_mla(jnp.asarray(q), jnp.asarray(kv), jnp.asarray(causal), scale=SCALE, value_dim=V)
    assert relative_error(prefill, dense) < 1e-6
    # One row of each of two requests, their rows of kv scattered over a cache of NaN.
    slots = rng.permutation(3 * T)[:T]
    cache = np.full((3 * T, C), np.nan, np.float32)
    cache[slots] = kv
    rows = np.array([T - 1, 4])
    indices = np.where(causal[rows] >= 0, slots[causal[rows]], -1).astype(np.int32)
    decode = jit_mla(jnp.asarray(q[rows]), jnp.asarray(cache), jnp.asarray(indices), scale=SCALE, value_dim=V)
    assert relative_error(decode, dense[rows]) < 1e-6


def test_slots_nobody_selected_may_hold_nan(case):
    q, kv, indices = case
    kv = kv.copy()
    kv[[0, -1]] = np.nan
    out = jit_mla(*map(jnp.asarray, (q, kv, indices)), scale=SCALE, value_dim=V)
    assert relative_error(out, _dense(*case)) < 1e-6


def test_an_index_past_the_cache_is_no_key(case):
    q, kv, indices = case
    out = jit_mla(*map(jnp.asarray, (q, kv, np.where(indices < 0, SLOTS, indices))), scale=SCALE, value_dim=V)
    assert relative_error(out, _dense(*case)) < 1e-6


def test_large_scores_do_not_overflow(case):
    q, kv, indices = case
    out = jit_mla(jnp.asarray(q * 1e4), jnp.asarray(kv), jnp.asarray(indices), scale=SCALE, value_dim=V)
    assert np.isfinite(np.asarray(out)).all()
    assert relative_error(out, _dense(q * 1e4, kv, indices)) < 1e-6


def test_bfloat16_keeps_its_dtype_and_a_float32_softmax(case):
    q, kv, indices = (jnp.asarray(x) for x in case)
    q, kv = q.astype(jnp.bfloat16), kv.astype(jnp.bfloat16)
    out = jit_mla(q, kv, indices, scale=SCALE, value_dim=V)
    assert out.dtype == jnp.bfloat16
    exact = _dense(np.asarray(q, np.float32), np.asarray(kv, np.float32), np.asarray(indices))
    # Weights and output are rounded to 8 bits once each: two half-ulps.
    assert relative_error(np.asarray(out, np.float32), exact) < 2 * 2.0**-8


def test_no_tokens_give_no_output(case):
    q, kv, indices = (jnp.asarray(x) for x in case)
    assert jit_mla(q[:0], kv, indices[:0], scale=SCALE, value_dim=V).shape == (0, H, V)


def test_memory_is_bounded_by_the_row_block():
    T, K, C, block = 4096, 2048, 576, 16

    def abstract(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    args = (abstract(T, 8, C), abstract(10000, C), abstract(T, K, dtype=jnp.int32))
    text = jit_mla.lower(*args, scale=SCALE, value_dim=512, row_block=block).as_text()
    shapes = re.findall(r"tensor<((?:\d+x)*\d+)x[a-z]+\d+>", text)
    assert max(int(np.prod([int(n) for n in s.split("x")])) for s in shapes) == block * K * C


def test_wrong_arguments_are_named(case):
    args = tuple(jnp.asarray(x) for x in case)
    with pytest.raises(ValueError, match="row_block is 0"):
        sparse_mla(*args, scale=SCALE, value_dim=V, row_block=0)
    with pytest.raises(ValueError, match="value_dim is 15"):
        sparse_mla(*args, scale=SCALE, value_dim=15)
