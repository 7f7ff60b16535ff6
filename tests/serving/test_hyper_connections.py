"""Hyper-connections against their formulas in float64: what is divided by what, in which order, with which eps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from serving.models.hyper_connections import HyperConfig, HyperConnection, collapse, join, spread
from serving.models.sinkhorn import sinkhorn
from serving.models.sinkhorn.triton import sinkhorn_triton
from tests.helpers import relative_error
from tests.serving import glm5_next_reference as plain


@pytest.mark.parametrize(("streams", "eps", "spread_of_logits"), [(4, 1e-6, 3.0), (4, 0.03, 1.0), (2, 0.1, 8.0)])
def test_sinkhorn_divides_columns_first_and_last(streams, eps, spread_of_logits):
    logits = spread_of_logits * np.random.default_rng(streams).normal(size=(77, streams, streams))
    ours = sinkhorn(jnp.asarray(logits, jnp.float32), iterations=20, eps=eps)
    kernel = sinkhorn_triton(jnp.asarray(logits, jnp.float32), iterations=20, eps=eps, interpret=True)
    expected = plain.sinkhorn(logits.astype(np.float32).astype(np.float64), 20, eps)
    assert relative_error(ours, expected) < 5e-6
    assert relative_error(kernel, expected) < 5e-6


def test_columns_sum_to_one_and_rows_only_nearly():
    logits = 4 * np.random.default_rng(1).normal(size=(200, 4, 4)).astype(np.float32)
    c = np.asarray(sinkhorn(jnp.asarray(logits), iterations=20, eps=1e-6))
    assert np.abs(c.sum(1) - 1).max() < 1e-5
    assert 1e-3 < np.abs(c.sum(2) - 1).max() < 0.5


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_number_of_steps_is_that_of_the_model(iterations):
    logits = 2 * np.random.default_rng(2).normal(size=(9, 4, 4)).astype(np.float32)
    ours = sinkhorn(jnp.asarray(logits), iterations=iterations, eps=1e-3)
    assert relative_error(ours, plain.sinkhorn(logits.astype(np.float64), iterations, 1e-3)) < 5e-6


@pytest.fixture(scope="module")
def site():
    """A site of 3 streams of 20 features with eps large enough to see, its weights, and streams."""
    rng, config = np.random.default_rng(3), HyperConfig(streams=3, iterations=20, eps=0.05, norm_eps=0.2)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: HyperConnection(20, config)))
    weights = {"fn": rng.normal(size=(15, 60)) / 8, "base": rng.normal(size=15), "scale": [0.7, 1.3, 2.0]}
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(jnp.asarray(weights[str(path[0])], jnp.float32))
    h = rng.normal(size=(50, 3, 20)).astype(np.float32)
    reference = plain.Reference(
        {"hc_mult": 3, "hc_eps": 0.05, "hc_sinkhorn_iters": 20, "rms_norm_eps": 0.2},
        {f"x_{name}": np.asarray(value, np.float32) for name, value in weights.items()},
    )
    return nnx.merge(graphdef, state), reference, h


def test_a_site_collapses_and_spreads_as_its_formula_says(site):
    connection, reference, h = site
    post, comb, x = reference.mix("x_", h.astype(np.float64))
    ours, mixing = jax.jit(lambda h: connection(h, None))(h)
    assert relative_error(ours, x) < 2e-6
    assert relative_error(mixing.post, post) < 2e-6
    assert relative_error(mixing.streams, comb) < 5e-6
    y = np.random.default_rng(4).normal(size=x.shape).astype(np.float32)
    assert relative_error(join(jnp.asarray(h), jnp.asarray(y), mixing), reference.spread(post, comb, y, h)) < 2e-6


def test_streams_keep_their_dtype_and_are_rounded_once(site):
    connection, reference, h = site
    low = jnp.asarray(h, jnp.bfloat16)
    exact = np.asarray(low, np.float64)
    post, comb, _ = reference.mix("x_", exact)
    x, mixing = connection(low, None)
    assert x.dtype == jnp.bfloat16
    assert mixing.post.dtype == mixing.streams.dtype == jnp.float32
    y = jnp.ones_like(x)
    out = join(low, y, mixing)
    assert out.dtype == jnp.bfloat16
    assert relative_error(out, reference.spread(post, comb, np.ones(y.shape), exact)) < 2**-8


def test_streams_begin_as_copies_and_end_as_their_mean():
    x = jnp.asarray(np.random.default_rng(5).normal(size=(7, 6)), jnp.float32)
    h = spread(x, 4)
    assert h.shape == (7, 4, 6)
    np.testing.assert_array_equal(collapse(h), x)
    h = h * jnp.arange(4.0)[None, :, None]
    assert relative_error(collapse(h), 1.5 * np.asarray(x)) < 1e-6


def test_a_configuration_without_streams_is_refused():
    with pytest.raises(ValueError, match=r"streams is 0; it must be at least 1"):
        HyperConfig(streams=0, iterations=20, eps=1e-6, norm_eps=1e-5)
