"""On an AMD GPU: float8 keys in the architecture's own format. `-m rocm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import KeyFormat, RowBatch, encode_keys, encode_queries, topk_rows
from dsa_indexer.scores import row_scores
from tests.helpers import relative_error
from vitstripe.platform import default_platform

pytestmark = pytest.mark.rocm


@pytest.fixture(scope="module")
def form() -> KeyFormat:
    """The format of the device at hand."""
    return KeyFormat.fp8(default_platform().arch)


def random_keys(rows=24, keys=1501, heads=32, dim=128):
    draw = np.random.default_rng(7)
    q, k = (jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for shape in ((rows, heads, dim), (keys, dim)))
    return q, jnp.abs(jnp.asarray(draw.normal(size=(rows, heads)), jnp.float32)), k


def test_scores_of_float8_keys_are_those_of_the_numbers_they_hold(form):
    q, gates, keys = random_keys()
    (q8, gates8), (keys8, scales) = encode_queries(q, gates, form), encode_keys(keys, form)
    assert keys8.dtype == form.jax_dtype
    lengths = jnp.full(len(q), len(keys), jnp.int32)
    got = np.asarray(jax.jit(row_scores)(q8, gates8, keys8, scales, 0 * lengths, lengths))
    products = np.einsum("mhd,nd->mhn", np.asarray(q8, np.float64), np.asarray(keys8, np.float64))
    wanted = np.einsum("mh,mhn->mn", np.asarray(gates8, np.float64), np.maximum(products, 0)) * np.asarray(scales)
    assert relative_error(got, wanted) < 1e-3


def test_float8_keys_select_nearly_the_keys_that_bfloat16_selects(form):
    q, gates, keys = random_keys()
    lengths = jnp.full(len(q), len(keys), jnp.int32)
    rows = RowBatch(0 * lengths, lengths)
    exact = np.asarray(topk_rows(q, gates, keys, None, rows, k=256))
    (q8, gates8), (keys8, scales) = encode_queries(q, gates, form), encode_keys(keys, form)
    rounded = np.asarray(topk_rows(q8, gates8, keys8, scales, rows, k=256))
    shared = [len(np.intersect1d(a, b)) / 256 for a, b in zip(exact, rounded, strict=True)]
    assert np.mean(shared) > 0.9


def test_the_other_architecture_s_bytes_would_be_off_by_two(form):
    other = KeyFormat("float8_e4m3fnuz" if form.dtype == "float8_e4m3fn" else "float8_e4m3fn")
    ones = jnp.full((1, 8), 1.0, form.jax_dtype)
    misread = jax.lax.bitcast_convert_type(ones, other.jax_dtype).astype(jnp.float32)
    assert set(np.unique(misread)) <= {0.5, 2.0}
