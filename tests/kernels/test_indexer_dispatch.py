"""The indexer's functions with their kernels, interpreted: the same bits whatever else is in the launch."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from dsa_indexer import RowBatch, sparse_mla, striped_topk_rows, topk_paged, topk_rows
from dsa_indexer.chunks import LOGITS_BYTES
from dsa_indexer.quant import KeyFormat
from dsa_indexer.scores import paged_scores, row_scores
from dsa_indexer.topk import LARGEST_K, select_topk
from scripts.lib.amd_isa import kernel_sources
from tests.dsa_indexer.batches import every_copy, striping
from vitstripe.platform import Platform

CUDA, GFX942, GFX950 = Platform("cuda", "", ""), Platform("rocm", "gfx942", ""), Platform("rocm", "gfx950", "")
M, N, H, D, K = 24, 150, 32, 16, 37


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run as plain JAX operations, so that what a GPU would run can be run here."""
    compiled = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **options: compiled(*args, **options | {"interpret": True}))


def batch(seed: int = 0):
    """Two requests of 60 and 90 keys, with equal keys among them; rows of 0 keys, of fewer than K and of all."""
    draw = np.random.default_rng(seed)
    q, keys = (jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for shape in ((M, H, D), (N, D)))
    keys = keys.at[70:80].set(keys[100])
    second = np.arange(M) >= M // 3
    ks, lengths = np.where(second, 60, 0), np.where(second, 90, 60) - np.arange(M) % 7
    lengths[[3, 11]], lengths[5] = 0, K - 2
    rows = RowBatch(jnp.asarray(ks, jnp.int32), jnp.asarray(lengths, jnp.int32))
    return q, jnp.asarray(draw.normal(size=(M, H)), jnp.float32), keys, None, rows


def selected(q, gates, keys, scales, rows, **options) -> np.ndarray:
    run = jax.jit(partial(topk_rows, k=K, platform=CUDA, **options))
    return np.asarray(run(q, gates, keys, scales, rows))


@cache
def whole_selection() -> np.ndarray:
    """Of every row of batch(), in one launch; for tests with `interpreted`."""
    return selected(*batch())


def exact(q, gates, keys, scales, rows) -> np.ndarray:
    """The selection by scores in float64."""
    found = np.full((M, K), -1)
    for m, (start, length) in enumerate(zip(np.asarray(rows.ks), np.asarray(rows.lengths), strict=True)):
        dots = np.asarray(q[m], np.float64) @ np.asarray(keys[start : start + length], np.float64).T
        order = np.argsort(-(np.maximum(dots, 0).T @ np.asarray(gates[m], np.float64)), kind="stable")[:K]
        found[m, : len(order)] = np.sort(order)
    return found


def test_a_row_is_selected_the_same_in_every_launch_and_chunk(interpreted):
    q, gates, keys, scales, rows = batch()
    whole = whole_selection()
    np.testing.assert_array_equal(whole, exact(q, gates, keys, scales, rows))
    np.testing.assert_array_equal(selected(q, gates, keys, scales, rows, logits_bytes=1), whole)
    some = np.array([20, 2, 9])
    part = selected(q[some], gates[some], keys, scales, RowBatch(rows.ks[some], rows.lengths[some]))
    np.testing.assert_array_equal(part, whole[some])


@pytest.mark.multidevice
@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_striped_rows_are_selected_the_same_on_every_device(interpreted, merge, mesh_of):
    args, whole = batch(), whole_selection()
    run = jax.jit(partial(striped_topk_rows, k=K, mesh=mesh_of(2), stripes=striping(3, merge), platform=CUDA))
    for copy in every_copy(run(*args), 2):
        np.testing.assert_array_equal(copy, whole)


def test_paged_keys_are_selected_as_contiguous_ones(interpreted):
    q, gates, keys, _, rows = batch()
    own = np.arange(M) >= M // 3  # the second request's rows: 90 keys in 6 pages of 15
    table = np.array([4, 1, 7, 0, 5, 3], np.int32)
    pages = jnp.full((9, 15, D), jnp.nan, jnp.bfloat16).at[table].set(keys[60:].reshape(6, 15, D))
    run = jax.jit(partial(topk_paged, k=K, platform=CUDA))
    q, gates, lengths = (x[own].reshape(2, -1, *x.shape[1:]) for x in (q, gates, rows.lengths))
    got = run(q, gates, pages, jnp.asarray(np.stack([table, table])), lengths)
    want = whole_selection()[own]
    np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), want)


def kernels(fn, *args, arch: str = "gfx942") -> set[str]:
    return {source.name for source in kernel_sources(fn, args, arch)}


def shape(*sizes: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("platform", "dtype", "heads", "dim", "served"),
    [
        (GFX942, jnp.bfloat16, 32, 128, True),
        (GFX942, jnp.bfloat16, 64, 128, True),
        (GFX942, KeyFormat.fp8("gfx942").jax_dtype, 32, 128, True),
        (GFX942, KeyFormat.fp8("gfx950").jax_dtype, 32, 128, False),
        (GFX950, KeyFormat.fp8("gfx950").jax_dtype, 32, 128, True),
        (GFX942, jnp.float32, 32, 128, False),
        (GFX942, jnp.bfloat16, 24, 128, False),
        (GFX942, jnp.bfloat16, 256, 128, False),
        (GFX942, jnp.bfloat16, 32, 96, False),
        (Platform("cpu", "", ""), jnp.bfloat16, 32, 128, False),
    ],
    ids=str,
)
def test_rows_and_pages_are_scored_alike_by_a_kernel_or_by_plain_xla(platform, dtype, heads, dim, served):
    q, gates = shape(8, heads, dim, dtype=dtype), shape(8, heads, dtype=jnp.float32)
    arch = platform.arch or "gfx942"
    rows = partial(row_scores, key_scales=None, platform=platform)
    found = kernels(
        lambda q, gates, keys, ks, lengths: rows(q, gates, keys, ks=ks, lengths=lengths),
        *(q, gates, shape(200, dim, dtype=dtype), shape(8), shape(8)),
        arch=arch,
    )
    of_pages = kernels(
        lambda q, gates, pages, table, lengths: paged_scores(q, gates, pages, None, table, lengths, platform=platform),
        *(shape(2, 4, heads, dim, dtype=dtype), shape(2, 4, heads, dtype=jnp.float32)),
        *(shape(9, 16, dim, dtype=dtype), shape(2, 5), shape(2, 4)),
        arch=arch,
    )
    assert found == of_pages == ({"index_scores"} if served else set())


def test_large_selections_and_named_implementations_are_plain_xla():
    args = shape(8, 20_000, dtype=jnp.float32), shape(8), shape(8)
    assert kernels(partial(select_topk, k=LARGEST_K, platform=GFX942), *args)
    assert not kernels(partial(select_topk, k=LARGEST_K + 1, platform=GFX942), *args)
    assert not kernels(partial(select_topk, k=5, implementation="threshold", platform=GFX942), *args)


def test_sparse_attention_in_float32_is_plain_xla():
    for dtype, found in ((jnp.bfloat16, {"sparse_mla"}), (jnp.float32, set())):
        args = shape(4, 3, 46, dtype=dtype), shape(99, 46, dtype=dtype), shape(4, 30)
        assert kernels(partial(sparse_mla, scale=0.1, value_dim=40, platform=GFX942), *args) == found


@pytest.mark.gpu
@pytest.mark.parametrize("logits_bytes", [LOGITS_BYTES, 64 << 30], ids=["by default", "as much as there is"])
@pytest.mark.parametrize(
    ("rows", "num_keys"),
    [(23_160, 23_170), (23_176, 23_170), (23_176, 23_176), (16_385, 131_072)],
    ids=["below 2 GiB", "above", "well above", "above 2^31 scores"],
)
def test_on_a_gpu_scores_of_any_total_size_find_the_key_near_the_start(rows, num_keys, logits_bytes):
    """32-bit offsets, in elements or in bytes, would lose it, and the rows at the end first."""
    draw, heads, dim, k = np.random.default_rng(6), 8, 32, 64
    q = jnp.asarray(np.abs(draw.normal(size=(rows, heads, dim))) + 0.5, jnp.bfloat16)
    keys = np.asarray(draw.normal(size=(num_keys, dim)) * 0.01, np.float32)
    keys[5] = 2.0
    lengths = jnp.asarray(num_keys - np.arange(rows)[::-1] % 1000, jnp.int32)
    batch = RowBatch(0 * lengths, lengths)
    args = q, jnp.ones((rows, heads), jnp.float32), jnp.asarray(keys, jnp.bfloat16), None
    found = np.asarray(jax.jit(partial(topk_rows, k=k, logits_bytes=logits_bytes))(*args, batch))
    assert (found == 5).any(1).all(), f"{int((~(found == 5).any(1)).sum())} of {rows} rows lost it"
    assert (np.diff(found, axis=1) > 0).all(), "ascending, no key twice"
    some = np.array([0, 1, rows // 2, rows - 1])
    few = RowBatch(batch.ks[some], lengths[some])
    alone = jax.jit(partial(topk_rows, k=k))(args[0][some], args[1][some], args[2], None, few)
    np.testing.assert_array_equal(found[some], alone)
