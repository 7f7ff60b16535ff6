"""The kernel of the grouped product against float64, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.models.grouped_matmul import grouped_matmul
from serving.models.grouped_matmul.reference import grouped_matmul_reference
from serving.models.grouped_matmul.tiles import GroupTile, group_tile
from serving.models.grouped_matmul.triton import grouped_matmul_triton, serves, tiles_of
from tests.helpers import det, relative_error
from vitstripe.platform import Platform, platform_of

CUDA = Platform("cuda", "", "")
TILE = GroupTile(rows=16, columns=32, depth=16, warps=4, stages=1)
SIZES = {
    "uneven": [0, 5, 33, 16, 0, 1],
    "one expert": [0, 0, 0, 55, 0, 0],
    "nobody": [0, 0, 0, 0, 0, 0],
    "everything": [10, 11, 12, 9, 13, 15],
}
M, T = 70, 23

_kernel = jax.jit(grouped_matmul_triton, static_argnames=("platform", "tile", "interpret"))


def case(sizes, outputs, inputs, dtype=jnp.float32):
    x, w = jnp.asarray(det((T, inputs), 1), dtype), jnp.asarray(det((len(sizes), outputs, inputs), 2), dtype)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.random.default_rng(0).integers(0, T - 1, M).astype(np.int32)
    rows[len(owner) :] = T - 1
    wide = np.asarray(x, np.float64)[rows[: len(owner)]]
    exact = np.einsum("mi,moi->mo", wide, np.asarray(w, np.float64)[owner])
    # The row that only those of no expert take holds NaN.
    return x.at[T - 1].set(jnp.nan), w, jnp.asarray(sizes, jnp.int32), jnp.asarray(rows), exact


@pytest.mark.parametrize("shape", [(40, 33), (32, 64), (5, 16)])
@pytest.mark.parametrize("name", SIZES)
def test_each_row_meets_the_matrix_of_its_expert(name, shape):
    *args, exact = case(SIZES[name], *shape)
    for y in (_kernel(*args, platform=CUDA, tile=TILE, interpret=True), grouped_matmul_reference(*args)):
        assert y.shape == (M, shape[0])
        if len(exact):
            assert relative_error(np.asarray(y)[: len(exact)], exact) < 1e-6


def test_tiles_cover_every_row_of_an_expert_once():
    sizes = np.array(SIZES["uneven"], np.int32)
    count = M // 16 + len(sizes)
    expert, first, end = (np.asarray(a) for a in tiles_of(jnp.asarray(sizes), 16, count))
    owners = np.full(M, -1)
    for e, start, stop in zip(expert, first, end, strict=True):
        here = slice(start, min(start + 16, stop))
        assert (owners[here] == -1).all()
        owners[here] = e
    np.testing.assert_array_equal(owners[: sizes.sum()], np.repeat(np.arange(len(sizes)), sizes))
    assert (owners[sizes.sum() :] == -1).all()


def test_the_grid_has_room_for_the_worst_split_of_the_rows():
    for sizes in ([1] * 6 + [64 - 16 + 1], [17, 17, 17, 16, 3], [1, 1, 1, 67], [70]):
        used = sum(-(-s // 16) for s in sizes)
        assert used <= M // 16 + min(len(sizes), M)


def test_the_kernel_serves_what_fits_its_offsets():
    def shape(*sides, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sides, dtype)

    x, w = shape(64, 4096), shape(36, 2048, 4096)
    assert serves(x, w, 512, CUDA)
    assert not serves(x, shape(288, 2048, 4096), 512, CUDA), "2.4e9 weights are past 32 bits"
    assert not serves(x, w, 2**20, CUDA), "and so are the results of a million rows"
    assert not serves(shape(64, 4096, dtype=jnp.float32), shape(36, 2048, 4096, dtype=jnp.float32), 512, CUDA)
    assert not serves(x, w, 512, Platform("cpu", "", ""))
    assert not serves(shape(0, 4096), w, 0, CUDA)


def test_tiles_grow_with_the_rows_of_an_expert():
    for arch in ("sm90", "sm80", "gfx942", "gfx950"):
        platform = Platform("cuda" if arch.startswith("sm") else "rocm", arch, "")
        assert [group_tile(platform, m, 36).rows for m in (8, 512, 4096, 65536)] == [16, 16, 64, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_on_a_gpu_the_kernel_is_as_exact_as_bfloat16_allows(name):
    platform = platform_of(jax.devices()[0])
    for tile in (None, GroupTile(64, 128, 64, 4, 1), GroupTile(128, 128, 32, 8, 1)):
        *args, exact = case(SIZES[name], 200, 192, jnp.bfloat16)
        y = _kernel(*args, platform=platform, tile=tile)
        if len(exact):
            assert relative_error(np.asarray(y, np.float64)[: len(exact)], exact) < 2**-8
    assert np.isfinite(np.asarray(grouped_matmul(*args), np.float32)[: len(exact)]).all()
