"""The layers against their formulas in numpy, on sizes that are no powers of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.helpers import det, relative_error
from vitstripe.nn import LayerNorm, Linear, RMSNorm, linear, param, rotate_half, rotate_pairs

FLOAT32_NOISE = 5e-7


def filled(module: nnx.Module, seed: int = 0) -> nnx.Module:
    """The module with every parameter set to non-zero reference values."""
    for i, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(module))):
        value = variable.get_value()
        variable.set_value(jnp.asarray(det(value.shape, seed + i), value.dtype))
    return module


def test_linear_is_x_times_the_transposed_weight_plus_bias():
    layer = filled(Linear(7, 5, dtype=jnp.float32, bias=True), seed=3)
    x = det((2, 3, 7), 1)
    expected = x.astype(np.float64) @ np.asarray(layer.weight[...]).T + np.asarray(layer.bias[...])
    assert relative_error(layer(jnp.asarray(x)), expected) < FLOAT32_NOISE


def test_bfloat16_products_are_summed_in_float32():
    # 1 + 4096 * 2^-9 is 9; a bfloat16 sum would stay at 1, for 2^-9 is less than half a step there.
    x = jnp.ones((1, 4097), jnp.bfloat16)
    weight = jnp.full((1, 4097), 2.0**-9, jnp.bfloat16).at[0, 0].set(1)
    y = linear(x, weight)
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0]) == 9.0


@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_row_cut_and_a_column_cut_layer_sum_to_the_whole(mesh_of, tp):
    up = filled(Linear(6, 20, dtype=jnp.float32, bias=True, tp="out"), seed=1)
    down = filled(Linear(20, 6, dtype=jnp.float32, tp="in"), seed=5)
    x = jnp.asarray(det((3, 6), 9))
    modules = nnx.split((up, down))

    def spec(variable):
        axis = variable.get_metadata("tp_axis")
        return variable.replace(P() if axis is None else P(*[None] * axis, "tp"))

    specs = jax.tree.map(spec, modules[1], is_leaf=lambda v: isinstance(v, nnx.Variable))

    def local(state, x):
        first, second = nnx.merge(modules[0], state)
        return jax.lax.psum(second(first(x)), "tp")

    y = jax.jit(jax.shard_map(local, mesh=mesh_of(tp), in_specs=(specs, P()), out_specs=P()))(modules[1], x)
    assert relative_error(y, down(up(x))) < FLOAT32_NOISE


def test_a_bias_on_a_column_cut_layer_is_refused():
    with pytest.raises(ValueError, match="once a device"):
        Linear(4, 6, dtype=jnp.float32, bias=True, tp="in")


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_layer_norm_centres_scales_and_shifts(eps):
    layer = filled(LayerNorm(11, eps=eps), seed=2)
    x = det((2, 5, 11), 4) * 0.1 + 3
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    expected = expected * np.asarray(layer.weight[...]) + np.asarray(layer.bias[...])
    assert (
        relative_error(layer(jnp.asarray(x)), expected) < 5e-6
    )  # the input is 30 times its spread, so some bits are gone


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_divides_by_the_root_of_the_mean_square(eps):
    layer = filled(RMSNorm(13, eps=eps), seed=6)
    x = det((4, 13), 8) * 0.2
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * np.asarray(layer.weight[...])
    assert relative_error(layer(jnp.asarray(x)), expected) < FLOAT32_NOISE


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_norms_keep_bfloat16_outside_and_float32_inside(norm):
    layer = filled(norm(300, eps=1e-6), seed=1)
    x = jnp.asarray(det((2, 300), 2), jnp.bfloat16)
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, layer(x.astype(jnp.float32)).astype(jnp.bfloat16))


def as_complex(x: np.ndarray, layout: str) -> np.ndarray:
    half = x.shape[-1] // 2
    real, imag = (x[..., :half], x[..., half:]) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    return real + 1j * imag.astype(np.float64)


@pytest.mark.parametrize(("rotate", "layout"), [(rotate_half, "half"), (rotate_pairs, "pairs")])
def test_rotary_embedding_turns_each_pair_by_its_angle(rotate, layout):
    x, angle = det((5, 3, 14), 1), det((5, 1, 7), 2) * 4
    turned = rotate(jnp.asarray(x), jnp.cos(angle), jnp.sin(angle))
    assert turned.shape == x.shape
    expected = as_complex(x, layout) * np.exp(1j * angle.astype(np.float64))
    found = as_complex(np.asarray(turned), layout)
    assert np.abs(found - expected).max() < 1e-6


def test_the_two_rotary_layouts_differ():
    x, cos, sin = (jnp.asarray(det(shape, 1)) for shape in ((2, 6), (2, 3), (2, 3)))
    assert jnp.abs(rotate_half(x, cos, sin) - rotate_pairs(x, cos, sin)).max() > 0.1


def test_a_shape_mistake_is_an_error_in_tests():
    with pytest.raises(Exception, match="linear"):
        linear(jnp.ones((2, 7)), jnp.ones((5, 6)))


def test_parameters_carry_what_the_loader_reads():
    kernel = param((12, 24), jnp.float32, disk_shape=(12, 3, 2, 2, 2), tp_axis=1)
    assert kernel.get_metadata("disk_shape") == (12, 3, 2, 2, 2)
    assert kernel.get_metadata("tp_axis") == 1
    assert param((5,), jnp.float32).get_metadata("disk_shape") == (5,)
