"""How towers read their learned position tables."""

import json

import numpy as np
import pytest

from tests.helpers import GOLDENS
from vitbatch.towers import family_of

GRIDS = [(2, 4), (8, 6), (64, 16), (2, 2), (2, 14), (228, 2)]


def read_table(family: str, side: int, gh: int, gw: int, merge: int = 2):
    """Taps of a grid in a side x side table: index and weight, both [N, taps], patches in merge-block order."""
    hf = json.loads((GOLDENS / family / "config.json").read_text())
    hf["vision_config"] |= {"spatial_merge_size": merge, "num_position_embeddings": side**2, "image_size": side * 14}
    found = family_of(family)
    index, weight = found.position_taps(found.read_config(hf), gh, gw)
    assert (index.dtype, weight.dtype) == (np.int32, np.float32)
    assert index.shape == weight.shape == (gh * gw, found.num_taps)
    assert index.min() >= 0
    assert index.max() < side**2
    return index, weight


def in_merge_order(grid: np.ndarray) -> np.ndarray:
    gh, gw, *rest = grid.shape
    return grid.reshape(gh // 2, 2, gw // 2, 2, *rest).swapaxes(1, 2).reshape(gh * gw, *rest)


def places(ys: np.ndarray, xs: np.ndarray) -> np.ndarray:
    return in_merge_order(np.stack(np.meshgrid(ys, xs, indexing="ij"), -1))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen4_exp"])
@pytest.mark.parametrize(("gh", "gw"), GRIDS)
def test_qwen_tables_are_read_with_aligned_corners(family, gh, gw):
    index, weight = read_table(family, 48, gh, gw)
    # A table that is linear in row and column is reproduced exactly by the right interpolation.
    row, column = np.divmod(np.arange(48 * 48), 48)
    read = np.stack([(t[index] * weight).sum(-1) for t in (row, column)], -1)
    np.testing.assert_allclose(read, places(np.linspace(0, 47, gh), np.linspace(0, 47, gw)), atol=1e-5)
    np.testing.assert_allclose(weight.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize(("gh", "gw"), [(2, 3), (7, 5)])
def test_a_grid_of_odd_sides_is_read_with_aligned_corners_too(gh, gw):
    index, weight = read_table("qwen3_vl", 48, gh, gw, merge=1)
    row, column = np.divmod(np.arange(48 * 48), 48)
    read = np.stack([(t[index] * weight).sum(-1) for t in (row, column)], -1).reshape(gh, gw, 2)
    np.testing.assert_allclose(read[:, 0, 0], np.linspace(0, 47, gh), atol=1e-5)
    np.testing.assert_allclose(read[0, :, 1], np.linspace(0, 47, gw), atol=1e-5)


@pytest.mark.parametrize(("gh", "gw"), [(1, 1), (1, 7), (7, 1)])
def test_an_axis_of_one_cell_reads_the_first_row_of_a_qwen_table(gh, gw):
    index, weight = read_table("qwen3_vl", 8, gh, gw, merge=1)
    assert np.isfinite(weight).all()
    assert index[0, 0] == 0
    assert weight[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("gh", "gw"), GRIDS)
def test_a_glm_table_of_one_value_reads_as_that_value(gh, gw):
    _, weight = read_table("glm4v", 24, gh, gw)
    np.testing.assert_allclose(weight.sum(-1), 1, atol=1e-6)


def test_a_glm_grid_as_large_as_the_table_reads_it_cell_by_cell():
    table = np.random.default_rng(0).normal(size=24 * 24)
    index, weight = read_table("glm4v", 24, 24, 24)
    np.testing.assert_allclose((table[index] * weight).sum(-1), in_merge_order(table.reshape(24, 24)), atol=1e-7)


def test_a_glm_grid_of_half_the_table_reads_midway_between_cells():
    index, weight = read_table("glm4v", 24, 12, 12)
    # The cubic convolution kernel with a = -0.75 at distances 1.5, 0.5, 0.5 and 1.5.
    along = np.array([-0.09375, 0.59375, 0.59375, -0.09375])
    np.testing.assert_allclose(weight, np.tile(np.outer(along, along).ravel(), (144, 1)), atol=1e-7)
    # The first patch lies between the first two cells on both axes; what is outside repeats the edge.
    rows = np.array([0, 0, 1, 2])
    assert index[0].tolist() == (rows[:, None] * 24 + rows).ravel().tolist()
    last = np.array([21, 22, 23, 23])
    assert index[-1].tolist() == (last[:, None] * 24 + last).ravel().tolist()


@pytest.mark.parametrize(("gh", "gw"), GRIDS)
def test_a_mirrored_glm_table_gives_mirrored_positions(gh, gw):
    table = np.random.default_rng(1).normal(size=(24, 24))
    index, weight = read_table("glm4v", 24, gh, gw)
    read, mirrored = ((t.ravel()[index] * weight).sum(-1) for t in (table, table[::-1, ::-1]))
    upside_down = np.lexsort(places(-np.arange(gh), -np.arange(gw)).T[::-1])
    upright = np.lexsort(places(np.arange(gh), np.arange(gw)).T[::-1])
    np.testing.assert_allclose(read[upright], mirrored[upside_down], atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm_ocr", "glm5_next"])
def test_a_tower_without_a_table_has_no_taps(family):
    hf = json.loads((GOLDENS / family / "config.json").read_text())
    found = family_of(family)
    index, weight = found.position_taps(found.read_config(hf), 6, 4)
    assert index.shape == weight.shape == (24, 0)
