"""The sparse attention kernel against a dense softmax in float64, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import sparse_mla
from dsa_indexer.sparse_mla.triton import sparse_mla_triton
from dsa_indexer.tiles import SparseTile
from tests.helpers import relative_error
from vitstripe.platform import Platform, platform_of

CPU = Platform("cpu", "", "")
SCALE = 0.3
# Heads first and keys first; whole rows, and rows in parts of at least one block; scores in a branch.
TILES = {
    "heads first": SparseTile(heads=16, keys=16, warps=4, stages=1, programs=1),
    "keys first": SparseTile(heads=16, keys=16, warps=4, stages=1, programs=1, columns=16, keys_first=True),
    "heads first, in parts": SparseTile(heads=16, keys=16, warps=4, stages=1, programs=40, least_blocks=1),
    "keys first, in parts": SparseTile(
        heads=16, keys=16, warps=4, stages=1, programs=40, least_blocks=1, columns=32, keys_first=True
    ),
    "heads first, apart": SparseTile(heads=16, keys=16, warps=4, stages=1, programs=1, columns=16, apart=True),
    "keys first, in parts, apart": SparseTile(
        heads=32, keys=16, warps=4, stages=1, programs=40, least_blocks=1, columns=32, keys_first=True, apart=True
    ),
}
_OPTIONS = ("scale", "value_dim", "platform", "tile", "interpret")
attend = jax.jit(sparse_mla_triton, static_argnames=_OPTIONS)


def problem(rows: int, heads: int, width: int, slots: int, k: int, dtype=jnp.bfloat16, seed: int = 0):
    """(q, kv, indices): slot 0 and the last are selected by nobody and hold NaN. Row 0 has all its keys, row 1 none,
    row 2 few, row 3 gaps, row 4 indices past the cache."""
    draw = np.random.default_rng(seed)
    q = jnp.asarray(draw.normal(size=(rows, heads, width)) * 2, dtype)
    kv = jnp.asarray(draw.normal(size=(slots, width)), dtype).at[jnp.array([0, slots - 1])].set(jnp.nan)
    indices = np.stack([1 + draw.permutation(slots - 2)[:k] for _ in range(rows)]).astype(np.int32)
    indices[1], indices[2, 3:], indices[3, 2 : k - 5], indices[4, ::2] = -1, -1, -1, slots + 7
    return q, kv, jnp.asarray(indices)


def exact(q, kv, indices, value_dim: int) -> np.ndarray:
    q, kv, indices = np.asarray(q, np.float64), np.asarray(kv, np.float64), np.asarray(indices)
    out = np.zeros((*q.shape[:2], value_dim))
    for t, row in enumerate(indices):
        chosen = kv[row[(row >= 0) & (row < len(kv))]]
        if len(chosen):
            scores = q[t] @ chosen.T * SCALE
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[t] = weights / weights.sum(-1, keepdims=True) @ chosen[:, :value_dim]
    return out


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("heads", "width", "value_dim", "k"), [(3, 46, 40, 51), (16, 80, 64, 64), (20, 32, 32, 7)], ids=str
)
def test_the_output_is_the_softmax_over_the_selected_slots(tile, heads, width, value_dim, k):
    q, kv, indices = problem(6, heads, width, 97, k)
    got = attend(q, kv, indices, scale=SCALE, value_dim=value_dim, platform=CPU, tile=TILES[tile], interpret=True)
    assert got.shape == (6, heads, value_dim)
    assert got.dtype == jnp.bfloat16
    assert relative_error(np.asarray(got, np.float32), exact(q, kv, indices, value_dim)) < 1e-2
    assert (np.asarray(got[1], np.float32) == 0).all()


@pytest.mark.parametrize("tile", ["heads first", "keys first"])
def test_padding_of_a_selection_changes_no_bit(tile):
    q, kv, indices = problem(6, 3, 46, 97, 51)
    options = {"scale": SCALE, "value_dim": 40, "platform": CPU, "tile": TILES[tile], "interpret": True}
    alone = attend(q, kv, indices, **options)
    padded = attend(q, kv, jnp.pad(indices, [(0, 0), (0, 70)], constant_values=-1), **options)
    np.testing.assert_array_equal(np.asarray(padded, np.float32), np.asarray(alone, np.float32))


def test_a_row_is_the_same_in_every_launch_of_as_many_parts():
    q, kv, indices = problem(6, 3, 46, 97, 51)
    options = {"scale": SCALE, "value_dim": 40, "platform": CPU, "tile": TILES["heads first"], "interpret": True}
    together = np.asarray(attend(q, kv, indices, **options), np.float32)
    some = np.array([4, 0])
    np.testing.assert_array_equal(np.asarray(attend(q[some], kv, indices[some], **options), np.float32), together[some])


def test_large_scores_do_not_overflow():
    q, kv, indices = problem(6, 3, 46, 97, 51)
    options = {"scale": SCALE, "value_dim": 40, "platform": CPU, "tile": TILES["heads first"], "interpret": True}
    got = attend(q * 1e4, kv, indices, **options)
    assert relative_error(np.asarray(got, np.float32), exact(q * 1e4, kv, indices, 40)) < 1e-2


def test_without_rows_or_slots_nothing_is_read():
    q, kv, indices = problem(6, 3, 46, 97, 51)
    options = {"scale": SCALE, "value_dim": 40, "platform": CPU, "interpret": True}
    assert attend(q[:0], kv, indices[:0], **options).shape == (0, 3, 40)
    assert (np.asarray(attend(q, kv[:0], indices, **options), np.float32) == 0).all()


def test_arrays_the_kernel_cannot_take_are_refused_by_name():
    q, kv, indices = problem(6, 3, 46, 97, 51)
    options = {"scale": SCALE, "platform": CPU, "interpret": True}
    with pytest.raises(ValueError, match="not float32 and bfloat16"):
        sparse_mla_triton(q.astype(jnp.float32), kv, indices, value_dim=40, **options)
    with pytest.raises(ValueError, match="not 47 and -1"):
        sparse_mla_triton(q, kv, indices, value_dim=47, **options)
    with pytest.raises(ValueError, match="8192 indices a row, not 9000"):
        sparse_mla_triton(q, kv, jnp.full((6, 9000), -1, jnp.int32), value_dim=40, **options)
    with pytest.raises(ValueError, match="keys is 8"):
        SparseTile(heads=16, keys=8, warps=4, stages=1)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 140], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("heads", "width", "value_dim", "k"),
    [(8, 576, 512, 2048), (16, 576, 512, 2048), (64, 576, 512, 2048), (128, 576, 512, 2051), (3, 46, 40, 77)],
    ids=str,
)
def test_on_a_gpu_the_output_is_the_softmax_over_the_selected_slots(heads, width, value_dim, k, rows):
    q, kv, indices = problem(rows, heads, width, 5003, k)
    q = q / 8 if width > 100 else q
    # Freed memory of the size of the result holds a value that is none of the result's.
    jnp.full((rows, heads, value_dim), 1e9, jnp.bfloat16).block_until_ready().delete()
    platform = platform_of(jax.devices()[0])
    run = jax.jit(sparse_mla, static_argnames=("scale", "value_dim", "platform"))
    got = run(q, kv, indices, scale=SCALE, value_dim=value_dim, platform=platform)
    assert relative_error(np.asarray(got, np.float32), exact(q, kv, indices, value_dim)) < 1e-2
