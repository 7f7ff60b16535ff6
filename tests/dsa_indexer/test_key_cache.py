"""The paged key cache and the packed layout, against plain numpy on bytes."""

import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import (
    KeyFormat,
    encode_keys,
    encode_queries,
    gather_keys,
    pack_pages,
    store_keys,
    to_paged,
    topk_paged,
    unpack_pages,
)
from tests.dsa_indexer.oracle import scores_of, select

FORMATS = [KeyFormat("bfloat16"), KeyFormat("float8_e4m3fn", power_of_two=True), KeyFormat("float8_e4m3fnuz")]
FP8 = [form.dtype for form in FORMATS if form.is_fp8]


def _raw(x) -> np.ndarray:
    """The bytes of every element, so that NaN and -0 count, too."""
    x = np.ascontiguousarray(x)
    return x.view(np.uint8).reshape(*x.shape, x.dtype.itemsize)


def _pages(dtype: str, pages: int = 3, page: int = 5, dim: int = 12):
    """Keys of every byte pattern in turn and scales of every size."""
    keys = (np.arange(pages * page * dim) % 256).astype(np.uint8).view(jnp.dtype(dtype)).reshape(pages, page, dim)
    scales = np.exp2(np.arange(pages * page) * 3.7 % 80 - 40).astype(np.float32).reshape(pages, page)
    return keys, scales


def _packed(keys: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The layout said again, a byte at a time: all keys of a page, then all its scales."""
    pages, page, dim = keys.shape
    out = np.zeros((pages, page * (dim + 4)), np.uint8)
    for p in range(pages):
        for token in range(page):
            for channel in range(dim):
                out[p, token * dim + channel] = keys[p, token, channel].tobytes()[0]
            out[p, page * dim + 4 * token : page * dim + 4 * token + 4] = list(struct.pack("<f", scales[p, token]))
    return out


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.dtype)
def test_encoded_keys_and_scales_are_stored_and_gathered_bit_for_bit(form):
    """Two requests of 10 and 7 tokens on pages of 5, with padding in the pass that goes nowhere."""
    rng = np.random.default_rng(0)
    values, scales = encode_keys(jnp.asarray(rng.normal(size=(20, 12)), jnp.float32), form)
    slots = np.r_[30:35, 5:10, 15:20, 0, 1, [-1, -1, 40]].astype(np.int32)
    store = jax.jit(store_keys, donate_argnums=0)
    pages = store(jnp.ones((8, 5, 12), values.dtype), values, slots)
    out = gather_keys(pages, jnp.array([6, 1, 3, 0, -1], jnp.int32))
    np.testing.assert_array_equal(_raw(out[:17]), _raw(values[:17]))
    np.testing.assert_array_equal(np.asarray(out[17:20]).astype(np.float32), 1)
    np.testing.assert_array_equal(np.asarray(out[20:]).astype(np.float32), 0)
    for untouched in (2, 4, 5, 7):
        np.testing.assert_array_equal(np.asarray(pages[untouched]).astype(np.float32), 1)
    if form.is_fp8:
        scale_pages = store(jnp.ones((8, 5)), scales, slots)
        np.testing.assert_array_equal(gather_keys(scale_pages, jnp.array([6, 1, 3, 0], jnp.int32))[:17], scales[:17])


def test_decode_from_float8_pages_selects_by_scaled_scores():
    rng = np.random.default_rng(1)
    keys = jnp.asarray(rng.normal(size=(33, 12)) * np.exp2(rng.integers(-6, 6, (33, 1))), jnp.float32)
    q, gates = jnp.asarray(rng.normal(size=(8, 3, 12)), jnp.float32), jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    form = KeyFormat("float8_e4m3fn", power_of_two=True)
    (q, gates), (values, scales) = encode_queries(q, gates, form), encode_keys(keys, form)
    table = jnp.array([[6, 1, 3, 0, 7, 5, 2]], jnp.int32)
    slots = to_paged(jnp.arange(33, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32), table, 5)[0]
    pages = store_keys(jnp.zeros((8, 5, 12), values.dtype), values, slots)
    scale_pages = store_keys(jnp.full((8, 5), jnp.nan), scales, slots)
    lengths = jnp.arange(26, 34, dtype=jnp.int32)
    paged = jax.jit(topk_paged, static_argnames="k")(
        q[None], gates[None], pages, table, lengths[None], scale_pages=scale_pages, k=7
    )
    exact = scores_of(np.asarray(q).astype(np.float64), gates, np.asarray(values).astype(np.float64))
    starts = np.zeros(8, int)
    np.testing.assert_array_equal(paged[0], select(exact * np.asarray(scales), starts, np.asarray(lengths), 7))
    assert (select(exact, starts, np.asarray(lengths), 7) != np.asarray(paged[0])).any(), "the scales decide nothing"


@pytest.mark.parametrize(
    ("cache", "keys"),
    [("float8_e4m3fn", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e4m3fnuz")],
)
def test_a_cast_to_or_from_float8_would_lose_the_scale_and_is_refused(cache, keys):
    with pytest.raises(ValueError, match=f"keys are {keys} and the cache is {cache}"):
        store_keys(jnp.ones((2, 3, 4), cache), jnp.ones((5, 4), keys), jnp.arange(5, dtype=jnp.int32))


@pytest.mark.parametrize("dtype", FP8)
def test_the_packed_layout_is_all_keys_of_a_page_then_all_its_scales(dtype):
    keys, scales = _pages(dtype)
    packed = np.asarray(jax.jit(pack_pages)(keys, scales))
    np.testing.assert_array_equal(packed, _packed(keys, scales))
    assert packed.dtype == np.uint8


def test_a_key_of_128_channels_takes_132_bytes_in_pages_of_64():
    keys, scales = _pages("float8_e4m3fn", pages=2, page=64, dim=128)
    packed = np.asarray(pack_pages(jnp.asarray(keys), jnp.asarray(scales)))
    assert packed.shape == (2, 64 * 132)
    # Slot 64 + 9: its scale lies behind all 8192 bytes of keys of page 1.
    assert packed[1, 8192 + 9 * 4 :][:4].tobytes() == scales[1, 9].tobytes()
    assert packed[1, 9 * 128 : 10 * 128].tobytes() == keys[1, 9].tobytes()


@pytest.mark.parametrize("dtype", FP8)
def test_unpacking_gives_back_every_bit(dtype):
    keys, scales = _pages(dtype)
    packed = jnp.asarray(_packed(keys, scales))
    found_keys, found_scales = jax.jit(lambda x: unpack_pages(x, head_dim=12, dtype=dtype))(packed)
    np.testing.assert_array_equal(_raw(found_keys), _raw(keys))
    np.testing.assert_array_equal(_raw(found_scales), _raw(scales))
    assert found_keys.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pack_pages(jnp.ones((1, 2, 4), jnp.bfloat16), jnp.ones((1, 2))), "keys are bfloat16"),
        (lambda: unpack_pages(jnp.ones((1, 33), jnp.uint8), head_dim=12, dtype="float8_e4m3fn"), "33 bytes.*takes 16"),
        (lambda: unpack_pages(jnp.ones((1, 32), jnp.uint8), head_dim=12, dtype=jnp.bfloat16), "dtype is bfloat16"),
    ],
)
def test_what_has_no_packed_layout_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_cache_of_hundreds_of_gigabytes_is_addressed_by_slot_and_never_by_byte():
    """2^24 pages of 64 keys of 128: 2^37 elements. Only shapes, no memory; no integer that grows with the bytes."""
    num_pages = 2**24

    def of(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = of(num_pages, 64, 128, dtype=jnp.float8_e4m3fn)
    programs = {
        "store": (store_keys, pages, of(7, 128, dtype=pages.dtype), of(7, dtype=jnp.int32)),
        "gather": (gather_keys, pages, of(9, dtype=jnp.int32)),
        "pack": (pack_pages, pages, of(num_pages, 64, dtype=jnp.float32)),
    }
    for name, (fn, *args) in programs.items():
        text = jax.jit(fn).lower(*args).as_text()
        # The largest axis anything is indexed along is that of the slots, which int32 counts.
        axes = [int(n) for shape in re.findall(r"tensor<([\dx]+)x\w", text) for n in shape.split("x")]
        assert max(axes) <= num_pages * 64 < 2**31, name
        constants = [abs(int(n)) for n in re.findall(r"dense<(-?\d+)> : tensor<[\dx]*i32>", text)]
        assert max(constants, default=0) <= num_pages * 64, name
    assert jax.eval_shape(*programs["pack"]).shape == (num_pages, 64 * 132)
