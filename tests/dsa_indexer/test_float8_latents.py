"""Latent rows in float8: what is kept of them, and plain attention over them against a dense softmax in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import KeyFormat, LatentRows, encode_latents, sparse_mla
from dsa_indexer.sparse_mla.latents import widen, widened_by
from tests.helpers import relative_error

FORMATS = {"fn": KeyFormat("float8_e4m3fn"), "fnuz": KeyFormat("float8_e4m3fnuz")}
V, R, SLOTS, SCALE = 10, 4, 57, 0.3
run = jax.jit(sparse_mla, static_argnames=("scale", "value_dim", "row_block"))


def case(form: KeyFormat, dtype=jnp.float32, *, rotated: bool = True, rows: int = 21, heads: int = 3, k: int = 9):
    """(q, LatentRows, indices): row 4 selects nothing, others fewer and fewer; latents of very different sizes, and NaN
    in slot 0 and the last, which nobody selects."""
    draw = np.random.default_rng(0)
    q = jnp.asarray(2 * draw.normal(size=(rows, heads, V + R * rotated)), dtype)
    latents = draw.normal(size=(SLOTS, V)) * np.exp(2 * draw.normal(size=(SLOTS, 1)))
    latents[[0, -1]] = np.nan
    values, scales = encode_latents(jnp.asarray(latents, dtype), form)
    rest = jnp.asarray(draw.normal(size=(SLOTS, R)), dtype).at[jnp.array([0, -1])].set(jnp.nan) if rotated else None
    indices = np.stack([1 + draw.permutation(SLOTS - 2)[:k] for _ in range(rows)]).astype(np.int32)
    for t in range(rows):
        indices[t, k - t % 4 :] = -1
    indices[4] = -1
    return q, LatentRows(values, scales, rest), jnp.asarray(indices)


def dense(kv: LatentRows) -> np.ndarray:
    """What the rows stand for, in float64."""
    latents = np.asarray(kv.values.astype(jnp.float32), np.float64) * np.asarray(kv.scales, np.float64)[:, None]
    rest = [] if kv.rest is None else [np.asarray(kv.rest.astype(jnp.float32), np.float64)]
    return np.concatenate([latents, *rest], 1)


def exact(q, kv: LatentRows, indices, scale: float = SCALE) -> np.ndarray:
    q, rows, indices = np.asarray(q.astype(jnp.float32), np.float64), dense(kv), np.asarray(indices)
    out = np.zeros((*q.shape[:2], kv.values.shape[1]))
    for t, row in enumerate(indices):
        chosen = rows[row[(row >= 0) & (row < len(rows))]]
        if len(chosen):
            scores = q[t] @ chosen.T * scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[t] = weights / weights.sum(-1, keepdims=True) @ chosen[:, : out.shape[2]]
    return out


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("row_block", [1, 16])
def test_attention_is_the_softmax_over_what_the_rows_stand_for(form, rotated, row_block):
    q, kv, indices = case(form, rotated=rotated)
    out = run(q, kv, indices, scale=SCALE, value_dim=V, row_block=row_block)
    assert relative_error(out, exact(q, kv, indices)) < 1e-6
    assert (np.asarray(out[4]) == 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_output_has_the_queries_dtype_and_weights_and_output_are_rounded_once_each(dtype):
    q, kv, indices = case(FORMATS["fn"], dtype)
    # Scaled weights are then below what float16 holds with all its bits.
    kv = replace(kv, scales=kv.scales * 1e-3)
    out = run(q, kv, indices, scale=SCALE, value_dim=V)
    assert out.dtype == dtype
    assert relative_error(np.asarray(out, np.float32), exact(q, kv, indices)) < 2 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_number_moves_by_a_sixteenth_of_itself_or_by_half_a_step_at_the_bottom_of_its_row(form):
    latents = np.random.default_rng(1).normal(size=(40, 64)).astype(np.float32)
    values, scales = encode_latents(jnp.asarray(latents), form)
    assert (values.dtype, scales.dtype, scales.shape) == (form.jax_dtype, jnp.float32, (40,))
    found = dense(LatentRows(values, scales))
    smallest = float(jnp.finfo(form.jax_dtype).smallest_subnormal)
    assert (abs(found - latents) <= np.maximum(abs(latents) / 16, np.asarray(scales)[:, None] * smallest) * 1.001).all()


def test_a_row_that_is_not_finite_spoils_only_those_who_select_it():
    q, kv, indices = case(FORMATS["fnuz"])
    latents = jnp.asarray(dense(kv)[:, :V], jnp.float32).at[7, 3].set(jnp.nan).at[8, 0].set(jnp.inf)
    values, scales = encode_latents(latents, FORMATS["fnuz"])
    out = np.asarray(run(q, LatentRows(values, scales, kv.rest), indices, scale=SCALE, value_dim=V))
    hit = np.isin(np.asarray(indices), (7, 8)).any(1)
    assert 0 < hit.sum() < len(hit)
    np.testing.assert_array_equal(np.isnan(out).any((1, 2)), hit)
    np.testing.assert_array_equal(np.isnan(out).all((1, 2)), hit)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_code_is_widened_to_the_number_it_is(form):
    values = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), form.jax_dtype)
    found, want = jax.jit(widen)(values), np.asarray(values.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    finite = np.isfinite(want)
    assert finite.sum() == (255 if "fnuz" in str(form.dtype) else 254)
    np.testing.assert_array_equal((np.asarray(found, np.float32) * widened_by(values.dtype))[finite], want[finite])


def test_parts_that_do_not_fit_together_are_named():
    q, kv, indices = case(FORMATS["fn"])
    options = {"scale": SCALE, "value_dim": V}
    wide = LatentRows(kv.values.astype(jnp.float32), kv.scales, kv.rest)
    with pytest.raises(ValueError, match=r"values float32\[57, 10\] .* float8 values with one scale a row"):
        sparse_mla(q, wide, indices, **options)
    with pytest.raises(ValueError, match=r"scales float32\[57, 1\]"):
        sparse_mla(q, LatentRows(kv.values, kv.scales[:, None], kv.rest), indices, **options)
    with pytest.raises(ValueError, match=r"rest is bfloat16\[57, 4\]; it must be float32"):
        sparse_mla(q, LatentRows(kv.values, kv.scales, kv.rest.astype(jnp.bfloat16)), indices, **options)
    with pytest.raises(ValueError, match=r"value_dim is 9 .* LatentRows has 10 columns of values and 14 in all"):
        sparse_mla(q, kv, indices, scale=SCALE, value_dim=9)
    with pytest.raises(ValueError, match="q has 14 columns; LatentRows has 10 columns of values and 10 in all"):
        sparse_mla(q, LatentRows(kv.values, kv.scales), indices, **options)
