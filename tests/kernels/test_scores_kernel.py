"""The index score kernel against float64, interpreted and on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer.quant import KeyFormat, encode_keys, encode_queries
from dsa_indexer.scores.triton import paged_scores_triton, row_scores_triton
from dsa_indexer.tiles import ScoreTile
from tests.helpers import relative_error
from vitstripe.platform import Platform, platform_of

CUDA, GFX942, GFX950 = Platform("cuda", "", ""), Platform("rocm", "gfx942", ""), Platform("rocm", "gfx950", "")
CPU = Platform("cpu", "", "")
TILES = [ScoreTile(16, 32, 2, 4, 1), ScoreTile(16, 32, 2, 4, 1, ahead=True), ScoreTile(32, 64, 1, 4, 1)]
FORMATS = {
    "bfloat16": (KeyFormat("bfloat16"), CPU),
    "float8 of CUDA": (KeyFormat.fp8(""), CUDA),
    "float8 of gfx942": (KeyFormat.fp8("gfx942"), GFX942),
    "float8 of gfx950": (KeyFormat.fp8("gfx950"), GFX950),
}


_OPTIONS = ("platform", "tile", "interpret")
row_scores = jax.jit(row_scores_triton, static_argnames=_OPTIONS)
paged_scores = jax.jit(paged_scores_triton, static_argnames=_OPTIONS)


def problem(form: KeyFormat, rows: int, keys: int, heads: int, dim: int, seed: int = 0):
    """(q, gates, keys, scales, ks, lengths): two requests, one row of length 0."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)  # noqa: E731
    q, gates = encode_queries(normal(rows, heads, dim), normal(rows, heads), form)
    encoded, scales = encode_keys(normal(keys, dim), form)
    second = np.arange(rows) >= rows // 2
    ks = np.where(second, keys // 3, 0).astype(np.int32)
    room = np.where(second, keys - keys // 3, keys // 3)
    lengths = np.minimum(1 + np.arange(rows) * keys // rows, room).astype(np.int32)
    lengths[2], lengths[-1] = 0, room[-1]
    return q, gates, encoded, scales, jnp.asarray(ks), jnp.asarray(lengths)


def in_window(ks, lengths, keys: int) -> np.ndarray:
    column, ks, lengths = np.arange(keys), np.asarray(ks)[:, None], np.asarray(lengths)[:, None]
    return (column >= ks) & (column < ks + lengths)


def exact(q, gates, keys, scales) -> np.ndarray:
    dots = np.einsum("mhd,nd->mhn", np.asarray(q, np.float64), np.asarray(keys, np.float64))
    scores = np.einsum("mhn,mh->mn", np.maximum(dots, 0), np.asarray(gates, np.float64))
    return scores if scales is None else scores * np.asarray(scales, np.float64)


def paged(keys, scales, page: int, requests: int, seed: int = 0):
    """The same keys once a request, in pages in another order, among pages of NaN, and the table that finds them."""
    num_keys = keys.shape[0]
    pages = -(-num_keys // page)
    total = requests * pages + 3
    table = np.random.default_rng(seed).permutation(total)[: requests * pages].reshape(requests, pages).astype(np.int32)
    filled = jnp.pad(keys.astype(jnp.float32), [(0, pages * page - num_keys), (0, 0)]).reshape(pages, page, -1)
    key_pages = jnp.full((total, page, keys.shape[1]), jnp.nan).at[table].set(filled).astype(keys.dtype)
    scale_pages = None
    if scales is not None:
        filled = jnp.pad(scales, [(0, pages * page - num_keys)]).reshape(pages, page)
        scale_pages = jnp.full((total, page), jnp.nan).at[table].set(filled)
    # An entry past the last page may hold anything.
    return key_pages, scale_pages, jnp.pad(jnp.asarray(table), [(0, 0), (0, 1)], constant_values=10**9)


def of_requests(requests: int, *arrays):
    """The rows of all requests one after another -> [requests, rows, ...]."""
    return (x.reshape(requests, -1, *x.shape[1:]) for x in arrays)


@pytest.mark.parametrize("tile", TILES, ids=["one", "ahead", "wide"])
@pytest.mark.parametrize("name", FORMATS)
def test_scores_are_right_within_the_windows(name, tile):
    form, platform = FORMATS[name]
    q, gates, keys, scales, ks, lengths = problem(form, rows=13, keys=205, heads=4, dim=32)
    got = row_scores(q, gates, keys, scales, ks, lengths, platform=platform, tile=tile, interpret=True)
    seen = in_window(ks, lengths, 205)
    assert got.shape == (13, 205)
    assert relative_error(np.asarray(got)[seen], exact(q, gates, keys, scales)[seen]) < 1e-6


@pytest.mark.parametrize("name", ["bfloat16", "float8 of CUDA"])
def test_paged_keys_give_the_bits_of_contiguous_ones(name):
    form, platform = FORMATS[name]
    q, gates, keys, scales, *_ = problem(form, rows=10, keys=100, heads=4, dim=32)
    ks, lengths = jnp.zeros(10, jnp.int32), jnp.asarray([1, 60, 0, 99, 100, 7, 0, 33, 64, 98], jnp.int32)
    options = {"platform": platform, "tile": TILES[1], "interpret": True}
    flat = np.asarray(row_scores(q, gates, keys, scales, ks, lengths, **options))
    key_pages, scale_pages, table = paged(keys, scales, page=16, requests=2)
    q, gates, per_request = of_requests(2, q, gates, lengths)  # five rows each, which fill no tile
    got = np.asarray(paged_scores(q, gates, key_pages, scale_pages, table, per_request, **options))
    assert got.shape == (2, 5, 128)
    got, seen = got.reshape(10, 128), in_window(ks, lengths, 100)
    np.testing.assert_array_equal(got[:, :100][seen], flat[seen])


def test_a_key_of_nan_spoils_its_own_scores_alone():
    q, gates, keys, scales, ks, lengths = problem(KeyFormat("bfloat16"), rows=8, keys=96, heads=4, dim=32)
    options = {"platform": CPU, "tile": TILES[0], "interpret": True}
    clean = np.asarray(row_scores(q, gates, keys, scales, ks, lengths, **options))
    spoiled = np.asarray(row_scores(q, gates, keys.at[40].set(jnp.nan), scales, ks, lengths, **options))
    seen = in_window(ks, lengths, 96)
    assert np.isnan(spoiled[:, 40][seen[:, 40]]).all()
    seen[:, 40] = False
    np.testing.assert_array_equal(spoiled[seen], clean[seen])


def test_shapes_the_kernel_cannot_run_are_refused_by_name():
    q, gates, keys, scales, ks, lengths = problem(KeyFormat("bfloat16"), rows=8, keys=64, heads=4, dim=32)
    with pytest.raises(ValueError, match="3 index heads"):
        row_scores(q[:, :3], gates[:, :3], keys, scales, ks, lengths, platform=CPU)
    with pytest.raises(ValueError, match="head dimension 24"):
        row_scores(q[..., :24], gates, keys[:, :24], scales, ks, lengths, platform=CPU)
    with pytest.raises(ValueError, match="keys is 48"):
        ScoreTile(128, 48, 1, 4, 1)


def contracts(platform: Platform, heads: int, keys: jax.ShapeDtypeStruct | None = None, **options) -> bool:
    """Whether the kernel for this platform contracts products and sums itself."""
    shape = jax.ShapeDtypeStruct
    keys = keys or shape((200, 64), jnp.bfloat16)
    operands = shape((8, heads, 64), keys.dtype), shape((8, heads), jnp.float32), keys, None
    windows = shape((8,), jnp.int32), shape((8,), jnp.int32)
    return "inline_asm" in str(
        jax.make_jaxpr(partial(row_scores_triton, platform=platform, **options))(*operands, *windows)
    )


def test_hopper_alone_contracts_products_and_sums():
    hopper = Platform("cuda", "sm90", "")
    assert [heads for heads in (1, 2, 4, 8, 16, 32, 64, 128) if contracts(hopper, heads)] == [8, 16, 32, 64]
    assert not any(contracts(Platform("cuda", arch, ""), 32) for arch in ("", "sm80", "sm100", "sm103"))
    assert not any(contracts(amd, 32) for amd in (GFX942, GFX950))
    assert not contracts(hopper, 32, interpret=True)
    assert not contracts(hopper, 32, jax.ShapeDtypeStruct((200, 64), KeyFormat.fp8("sm90").jax_dtype))
    with pytest.raises(ValueError, match="blocks of 64 keys"):
        ScoreTile(128, 128, 1, 4, 1, contracted=True)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["bfloat16", "float8"])
def test_on_a_gpu_a_row_has_the_same_right_bits_in_every_launch(kind, heads):
    platform = platform_of(jax.devices()[0])
    form = KeyFormat("bfloat16") if kind == "bfloat16" else KeyFormat.fp8(platform.arch)
    q, gates, keys, scales, ks, lengths = problem(form, rows=48, keys=5003, heads=heads, dim=128)
    got, seen = (
        np.asarray(row_scores(q, gates, keys, scales, ks, lengths, platform=platform)),
        in_window(ks, lengths, 5003),
    )
    assert relative_error(got[seen], exact(q, gates, keys, scales)[seen]) < 1e-5
    for rows in (np.random.default_rng(1).permutation(48), np.arange(17, 30), np.array([33])):
        part = np.asarray(row_scores(q[rows], gates[rows], keys, scales, ks[rows], lengths[rows], platform=platform))
        np.testing.assert_array_equal(part[seen[rows]], got[rows][seen[rows]])


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [5003, 4096])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_on_a_gpu_every_score_is_the_sum_over_its_own_heads(heads, dim, keys):
    """To the bit, of small whole numbers, whose sums are exact in any order. How Hopper's kernel finds the heads of a
    row rests on how the compiler lays out a product, and the compiler would not say so if it did it otherwise."""
    platform, rows, draw = platform_of(jax.devices()[0]), 37, np.random.default_rng(heads)

    def whole(most, *shape):
        return jnp.asarray(draw.integers(-most, most + 1, shape), jnp.float32)

    q, gates, index_keys = whole(2, rows, heads, dim), whole(99, rows, heads), whole(2, keys, dim)
    q, index_keys = q.astype(jnp.bfloat16), index_keys.astype(jnp.bfloat16)
    want, ks = exact(q, gates, index_keys, None), jnp.zeros(rows, jnp.int32)
    lengths = jnp.full(rows, keys, jnp.int32)
    for _ in range(20):
        got = row_scores(q, gates, index_keys, None, ks, lengths, platform=platform)
        np.testing.assert_array_equal(np.asarray(got, np.float64), want)
    key_pages, _, table = paged(index_keys, None, page=64, requests=1)
    got = paged_scores(q[None], gates[None], key_pages, None, table, lengths[None], platform=platform)
    np.testing.assert_array_equal(np.asarray(got, np.float64)[0, :, :keys], want)


@pytest.mark.gpu
def test_on_a_gpu_paged_keys_give_the_bits_of_contiguous_ones():
    platform = platform_of(jax.devices()[0])
    q, gates, keys, scales, *_ = problem(KeyFormat.fp8(platform.arch), rows=6, keys=3000, heads=32, dim=128)
    ks, lengths = jnp.zeros(6, jnp.int32), jnp.asarray([1, 1000, 0, 2999, 3000, 77], jnp.int32)
    flat = np.asarray(row_scores(q, gates, keys, scales, ks, lengths, platform=platform))
    key_pages, scale_pages, table = paged(keys, scales, page=64, requests=3)
    q, gates, per_request = of_requests(3, q, gates, lengths)
    got = np.asarray(paged_scores(q, gates, key_pages, scale_pages, table, per_request, platform=platform))
    got, seen = got.reshape(6, -1), in_window(ks, lengths, 3000)
    np.testing.assert_array_equal(got[:, :3000][seen], flat[seen])
