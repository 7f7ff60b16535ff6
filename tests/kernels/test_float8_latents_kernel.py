"""The sparse attention kernel over float8 latents, interpreted and on a GPU, against plain XLA and float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import KeyFormat, LatentRows, encode_latents, sparse_mla
from dsa_indexer.sparse_mla.triton import sparse_mla_triton
from scripts.lib.amd_isa import kernel_sources
from tests.dsa_indexer.test_float8_latents import exact
from tests.helpers import relative_error
from tests.kernels.test_sparse_mla_kernel import CPU, SCALE, TILES, problem
from vitstripe.platform import Platform, platform_of

FORMATS = {"fn": KeyFormat.fp8("gfx950"), "fnuz": KeyFormat.fp8("gfx942")}
attend = jax.jit(sparse_mla_triton, static_argnames=("scale", "value_dim", "platform", "tile", "interpret"))
plain = jax.jit(sparse_mla, static_argnames=("scale", "value_dim", "platform"))


def float8_problem(rows: int, heads: int, width: int, value_dim: int, slots: int, k: int, form: KeyFormat):
    """`problem` with its latents in float8, of very different sizes. What nobody selects holds NaN, its scale too."""
    q, kv, indices = problem(rows, heads, width, slots, k)
    sizes = np.exp(np.random.default_rng(1).normal(size=(slots, 1)))
    values, scales = encode_latents(kv[:, :value_dim].astype(jnp.float32) * sizes, form)
    assert np.isnan(scales[jnp.array([0, slots - 1])]).all()
    return q, LatentRows(values, scales, kv[:, value_dim:] if width > value_dim else None), indices


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("heads", "width", "value_dim", "k", "form"),
    [(3, 46, 40, 51, "fnuz"), (8, 80, 64, 64, "fn"), (64, 33, 33, 7, "fnuz")],
    ids=str,
)
def test_the_output_is_the_softmax_over_what_the_rows_stand_for(tile, heads, width, value_dim, k, form):
    q, kv, indices = float8_problem(6, heads, width, value_dim, 97, k, FORMATS[form])
    options = {"scale": SCALE, "value_dim": value_dim, "platform": CPU}
    got = attend(q, kv, indices, tile=TILES[tile], interpret=True, **options)
    assert (got.shape, got.dtype) == ((6, heads, value_dim), jnp.bfloat16)
    got, theirs = (np.asarray(x, np.float32) for x in (got, plain(q, kv, indices, **options)))
    assert relative_error(got, exact(q, kv, indices)) < 1e-2
    assert relative_error(got, theirs) < 1e-2
    assert (got[1] == 0).all(), "a row without keys"


@pytest.mark.parametrize("tile", ["heads first", "keys first, in parts, apart"])
def test_a_selected_row_that_is_not_finite_is_not_lost(tile):
    q, kv, indices = float8_problem(6, 3, 46, 40, 97, 51, FORMATS["fnuz"])
    spoilt = int(indices[0, 20])
    kv = replace(kv, scales=kv.scales.at[spoilt].set(jnp.nan))
    options = {"scale": SCALE, "value_dim": 40, "platform": CPU, "tile": TILES[tile], "interpret": True}
    got = np.asarray(attend(q, kv, indices, **options), np.float32)
    hit = (np.asarray(indices) == spoilt).any(1)
    assert hit[0]
    assert not hit[1]
    np.testing.assert_array_equal(np.isnan(got).all((1, 2)), hit)
    np.testing.assert_array_equal(np.isnan(got).any((1, 2)), hit)


def test_padding_of_a_selection_changes_no_bit():
    q, kv, indices = float8_problem(6, 3, 46, 40, 97, 51, FORMATS["fn"])
    options = {"scale": SCALE, "value_dim": 40, "platform": CPU, "tile": TILES["keys first"], "interpret": True}
    alone = attend(q, kv, indices, **options)
    padded = attend(q, kv, jnp.pad(indices, [(0, 0), (0, 70)], constant_values=-1), **options)
    np.testing.assert_array_equal(np.asarray(padded, np.float32), np.asarray(alone, np.float32))


def test_without_rows_or_slots_nothing_is_read_and_other_queries_are_refused_by_name():
    q, kv, indices = float8_problem(6, 3, 46, 40, 97, 51, FORMATS["fn"])
    options = {"scale": SCALE, "value_dim": 40, "platform": CPU, "interpret": True}
    assert attend(q[:0], kv, indices[:0], **options).shape == (0, 3, 40)
    empty = jax.tree.map(lambda x: x[:0], kv)
    assert (np.asarray(attend(q, empty, indices, **options), np.float32) == 0).all()
    with pytest.raises(ValueError, match="float8 latents with bfloat16 q, not float16"):
        sparse_mla_triton(q.astype(jnp.float16), kv, indices, **options)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_kernel_serves_bfloat16_queries_and_the_architectures_own_float8(arch, dtype, form):
    def shape(*sizes: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    kv = LatentRows(shape(99, 40, dtype=form.jax_dtype), shape(99, dtype=jnp.float32), shape(99, 6, dtype=dtype))
    platform = Platform("rocm", arch, "")
    run = partial(sparse_mla, scale=0.1, value_dim=40, platform=platform)
    sources = kernel_sources(run, (shape(4, 3, 46, dtype=dtype), kv, shape(4, 30)), arch)
    served = dtype == jnp.bfloat16 and form == KeyFormat.fp8(arch)
    assert [source.name for source in sources] == ["sparse_mla"] * served


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 140], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("heads", "width", "value_dim", "k"),
    [(8, 576, 512, 2048), (16, 512, 512, 2051), (64, 576, 512, 2048), (128, 576, 512, 2048), (3, 46, 40, 77)],
    ids=str,
)
def test_on_a_gpu_the_output_is_the_softmax_over_what_the_rows_stand_for(heads, width, value_dim, k, rows):
    platform = platform_of(jax.devices()[0])
    q, kv, indices = float8_problem(rows, heads, width, value_dim, 5003, k, KeyFormat.fp8(platform.arch))
    q = q / 8 if width > 100 else q
    # Freed memory of the size of the result holds a value that is none of the result's.
    jnp.full((rows, heads, value_dim), 1e9, jnp.bfloat16).block_until_ready().delete()
    got = plain(q, kv, indices, scale=SCALE, value_dim=value_dim, platform=platform)
    assert relative_error(np.asarray(got, np.float32), exact(q, kv, indices)) < 1e-2
