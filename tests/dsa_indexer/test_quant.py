"""Quantisation against float64 arithmetic: values, scales, limits, power-of-two scales, and what is not finite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsa_indexer import KeyFormat, RowBatch, encode_keys, encode_queries, topk_rows
from dsa_indexer.hadamard import hadamard
from dsa_indexer.quant import quantise
from tests.dsa_indexer.oracle import scores_of, select
from tests.helpers import relative_error

FORMATS = {
    "fn": KeyFormat("float8_e4m3fn"),
    "fn, powers of two": KeyFormat("float8_e4m3fn", power_of_two=True),
    "fnuz": KeyFormat("float8_e4m3fnuz"),
    "fnuz, powers of two": KeyFormat("float8_e4m3fnuz", power_of_two=True),
    "fnuz up to 240": KeyFormat("float8_e4m3fnuz", limit=240.0),
}
LIMITS = {"fn": 448, "fnuz": 224, "fnuz up to 240": 240}
jit_quantise = jax.jit(quantise, static_argnames="form")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


def _limit(name: str) -> float:
    return LIMITS[name.removesuffix(", powers of two")]


def _scales(x: np.ndarray, name: str) -> np.ndarray:
    """The exact scale, rounded once to float32. A power of two is found by comparing, not by a logarithm."""
    exact = np.maximum(np.abs(x.astype(np.float64)).max(-1), np.float64(np.float32(1e-4))) / _limit(name)
    scale = exact.astype(np.float32)
    if "powers" in name:
        powers = np.ldexp(1.0, np.arange(-140, 128))
        scale = powers[np.searchsorted(powers, scale.astype(np.float64))].astype(np.float32)
    return scale


def _values(x: np.ndarray, scale: np.ndarray, name: str) -> np.ndarray:
    """The nearest float8 to the float32 quotient, ties to even, found among all of them in float64."""
    form = FORMATS[name]
    grid = np.arange(256, dtype=np.uint8).view(form.jax_dtype).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    wanted = np.clip((x / scale[..., None]).astype(np.float64), -_limit(name), _limit(name))
    upper = np.clip(np.searchsorted(grid, wanted), 1, len(grid) - 1)
    low, high = grid[upper - 1], grid[upper]
    even = (low.astype(form.jax_dtype).view(np.uint8) & 1) == 0
    take_low = (wanted - low < high - wanted) | ((wanted - low == high - wanted) & even)
    return np.where(take_low, low, high)


def _vectors(rng) -> np.ndarray:
    """64 vectors of 128 channels of very different sizes, with channels far below their vector's largest."""
    size = np.exp2(rng.integers(-20, 12, (64, 1)) + rng.integers(-14, 1, (64, 128)))
    return (rng.normal(size=(64, 128)) * size).astype(np.float32)


def test_scales_are_exact_and_values_are_the_nearest_float8(name, rng):
    x = _vectors(rng)
    values, scales = jit_quantise(x, form=FORMATS[name])
    assert (values.dtype, scales.dtype) == (FORMATS[name].jax_dtype, np.float32)
    np.testing.assert_array_equal(scales, _scales(x, name))
    np.testing.assert_array_equal(np.asarray(values).astype(np.float64), _values(x, np.asarray(scales), name))


def test_the_error_of_a_channel_is_half_a_step_of_its_size(name, rng):
    x = _vectors(rng).astype(np.float64)
    values, scales = (np.asarray(a).astype(np.float64) for a in jit_quantise(x.astype(np.float32), form=FORMATS[name]))
    # 3 fraction bits; below the smallest normal number the steps stop shrinking.
    smallest = float(ml_dtypes.finfo(FORMATS[name].jax_dtype).smallest_normal)
    step = np.maximum(np.abs(x / scales[:, None]), smallest) * 2.0**-3
    error = np.abs(values - x / scales[:, None]) / (step / 2)
    assert error.max() <= 1 + 1e-6
    assert (np.abs(values) <= _limit(name)).all()


def test_the_largest_channel_comes_out_at_the_limit_or_below_it_with_powers_of_two(name):
    x = np.full((3, 8), 0.5, np.float32)
    x[:, 3] = [7.0, -13.0, 1e-5]
    values, scales = jit_quantise(x, form=FORMATS[name])
    largest = np.abs(np.asarray(values).astype(np.float64)).max(-1)
    if "powers" in name:
        assert (largest <= _limit(name)).all()
        assert (largest > _limit(name) / 2 * (1 - 2**-4)).all()
    else:
        np.testing.assert_array_equal(largest[:2], _limit(name))
    np.testing.assert_allclose(largest * np.asarray(scales), [7, 13, 0.5], rtol=2**-4)


@pytest.mark.parametrize("exponent", [-30, -3, 0, 11])
def test_a_scale_that_is_a_power_of_two_already_is_not_doubled(exponent):
    for name, limit in LIMITS.items():
        form = FORMATS[name]
        form = KeyFormat(form.dtype, power_of_two=True, limit=form.limit)
        x = np.array([[limit, 1.0], [np.nextafter(np.float32(limit), np.float32(np.inf)), 1.0]], np.float32)
        x = np.ldexp(x, exponent)
        floor = np.float32(1e-4)
        _, scales = jit_quantise(x, form=form)
        want = [exponent, exponent + 1] if x.max() > floor else [np.ceil(np.log2(np.float64(floor) / limit))] * 2
        np.testing.assert_array_equal(scales, np.exp2(want))


def test_a_vector_of_zeros_or_of_subnormal_numbers_has_the_floor_scale_and_zero_values(name):
    x = np.zeros((3, 5), np.float32)
    x[1], x[2] = 1e-40, -1e-10
    values, scales = jit_quantise(x, form=FORMATS[name])
    np.testing.assert_array_equal(scales, _scales(x, name))
    assert scales[0] > 0
    np.testing.assert_array_equal(np.asarray(values).astype(np.float32), np.zeros((3, 5)))


def test_channels_below_the_smallest_normal_float8_keep_what_subnormal_steps_allow(name):
    limit, subnormal = _limit(name), float(ml_dtypes.finfo(FORMATS[name].jax_dtype).smallest_subnormal)
    x = np.array([[limit, 3 * subnormal, 0.4 * subnormal, -0.6 * subnormal, 2.5 * subnormal]], np.float32)
    values, scales = jit_quantise(x, form=FORMATS[name])
    np.testing.assert_array_equal(scales, [1])
    want = [limit, 3 * subnormal, 0, -subnormal, 2 * subnormal]  # a tie goes to the even step
    np.testing.assert_array_equal(np.asarray(values).astype(np.float64)[0], want)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_own_vector_nan_and_no_other(bad, name, rng):
    x = rng.normal(size=(3, 6)).astype(np.float32)
    clean_values, clean_scales = jit_quantise(x, form=FORMATS[name])
    x[1, 2] = bad
    values, scales = jit_quantise(x, form=FORMATS[name])
    assert np.isnan(np.asarray(values[1]).astype(np.float32)).all()
    assert scales[1] == 1
    for row in (0, 2):
        np.testing.assert_array_equal(values[row], clean_values[row])
        assert scales[row] == clean_scales[row]


def _operands(rng):
    """8 rows of 3 heads of very different sizes, 50 keys of very different sizes."""
    q = rng.normal(size=(8, 3, 16)) * np.array([1.0, 40.0, 0.02])[:, None]
    gates, keys = rng.normal(size=(8, 3)), rng.normal(size=(50, 16)) * np.exp2(rng.integers(-5, 5, (50, 1)))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, gates, keys))


def _exact(q, gates, keys, scales) -> np.ndarray:
    return scores_of(np.asarray(q).astype(np.float64), gates, np.asarray(keys).astype(np.float64)) * np.asarray(scales)


EVERY_KEY = RowBatch(jnp.zeros(8, jnp.int32), jnp.full(8, 50, jnp.int32))
jit_encode_keys = jax.jit(encode_keys, static_argnames="form")
jit_encode_queries = jax.jit(encode_queries, static_argnames="form")
jit_topk = jax.jit(topk_rows, static_argnames="k")


def test_the_query_scale_of_each_head_goes_into_its_gate(name, rng):
    """The float8 scores are those of the unquantised operands, as near as two roundings to 3 bits allow."""
    q, gates, keys = _operands(rng)
    q8, folded = jit_encode_queries(q, gates, form=FORMATS[name])
    k8, scales = jit_encode_keys(keys, form=FORMATS[name])
    found = _exact(q8, folded, k8, scales)
    most = scores_of(np.abs(q), np.abs(gates), np.abs(keys)) * ((1 + 2.0**-4) ** 2 - 1)
    assert (np.abs(found - scores_of(q, gates, keys)) / most).max() < 1
    if name in ("fn", "fnuz"):
        idx = jit_topk(q8, folded, k8, scales, EVERY_KEY, k=7)
        np.testing.assert_array_equal(idx, select(found, np.zeros(8, int), np.full(8, 50), 7))


@pytest.mark.parametrize("name", ["fn", "fnuz"])
def test_a_key_that_is_not_finite_is_selected_last(name, rng):
    q, gates, keys = _operands(rng)
    keys = keys.at[:43, 5].set(jnp.nan).at[44, 0].set(jnp.inf)
    q8, folded = jit_encode_queries(q, gates, form=FORMATS[name])
    k8, scales = jit_encode_keys(keys, form=FORMATS[name])
    # 6 keys are finite; the seventh is the first of the others, all of which rank alike.
    np.testing.assert_array_equal(
        jit_topk(q8, folded, k8, scales, EVERY_KEY, k=7), np.tile([0, 43, 45, 46, 47, 48, 49], (8, 1))
    )


def test_other_formats_cast_and_have_no_scale(rng):
    x = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    keys, scales = encode_keys(x, KeyFormat("bfloat16"))
    assert scales is None
    np.testing.assert_array_equal(keys, x.astype(jnp.bfloat16))
    keys, scales = encode_keys(x, KeyFormat())
    assert (keys.dtype, scales) == (x.dtype, None)
    q, gates = encode_queries(x[:, None], x[:, :1], KeyFormat("bfloat16"))
    assert q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gates, x[:, :1])


@pytest.mark.parametrize(
    ("arch", "dtype", "limit"),
    [
        ("gfx942", "float8_e4m3fnuz", 224),
        ("gfx950", "float8_e4m3fn", 448),
        ("gfx1201", "float8_e4m3fn", 448),
        ("", "float8_e4m3fn", 448),
        ("sm89", "float8_e4m3fn", 448),
        ("sm90", "float8_e4m3fn", 448),
    ],
)
def test_the_architecture_chooses_format_and_limit(arch, dtype, limit):
    form = KeyFormat.fp8(arch, power_of_two=True)
    assert (form.dtype, form.max, form.power_of_two, form.is_fp8) == (dtype, limit, True, True)


def test_the_two_formats_give_one_number_under_half_the_value_and_twice_the_scale(rng):
    """Why the limit of float8_e4m3fnuz is 224: the bytes agree wherever float8_e4m3fn has no extra value."""
    x = rng.normal(size=(16, 32)).astype(np.float32)
    fn, fnuz = (jit_quantise(x, form=FORMATS[kind]) for kind in ("fn", "fnuz"))
    np.testing.assert_array_equal(fnuz[1], 2 * fn[1])
    np.testing.assert_array_equal(2 * np.asarray(fnuz[0]).astype(np.float32), np.asarray(fn[0]).astype(np.float32))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KeyFormat("float16"), "dtype is 'float16'"),
        (lambda: KeyFormat("bfloat16", power_of_two=True), "only float8 keys have a scale"),
        (lambda: KeyFormat("float8_e4m3fnuz", limit=448.0), "holds magnitudes up to 240"),
        (lambda: KeyFormat("float8_e4m3fn", limit=0.0), r"limit is 0\.0"),
        (lambda: KeyFormat.fp8("gfx90a"), "gfx90a has no float8"),
        (lambda: KeyFormat.fp8("sm80"), "sm80 has no float8"),
        (lambda: quantise(jnp.ones((2, 4)), KeyFormat("bfloat16")), "bfloat16 has no limit"),
    ],
)
def test_a_format_that_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("dim", [1, 2, 16, 128])
def test_the_hadamard_rotation_is_the_sylvester_matrix_and_its_own_inverse(dim, rng):
    rotate = jax.jit(hadamard)
    x = rng.normal(size=(5, dim)).astype(np.float32)
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    out = rotate(x)
    assert relative_error(out, x.astype(np.float64) @ matrix / np.sqrt(dim)) < 1e-6
    assert relative_error(rotate(out), x) < 1e-6
    assert rotate(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_hadamard_rotation_of_another_size_is_refused():
    with pytest.raises(ValueError, match="12 dimensions"):
        hadamard(jnp.ones((2, 12)))
