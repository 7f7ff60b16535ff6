"""The Qwen3-VL tower against the outputs of the reference implementation."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers import det, relative_error
from vitbatch.encoder import Frame
from vitbatch.towers import family_of
from vitbatch.towers.qwen3_vl import position_taps, read_config

GRIDS = ("a_1x4x4", "b_1x6x10", "c_2x8x8", "d_mixed", "e_big_1x12x20")


def golden_frames(checkpoint, golden, name: str) -> list[Frame]:
    """A golden's input, one Frame for each frame of each image or video."""
    stated = json.loads((checkpoint / "meta.json").read_text())["vision"][name]
    rows = det(tuple(stated["input_shape"]), stated["input_seed"])
    grids = [(gh, gw) for t, gh, gw in golden[f"{name}.grid_thw"].tolist() for _ in range(t)]
    ends = np.cumsum([gh * gw for gh, gw in grids])
    return [Frame(rows[end - gh * gw : end], (gh, gw)) for end, (gh, gw) in zip(ends, grids, strict=True)]


@pytest.fixture(scope="module")
def golden(checkpoint):
    return load_file(checkpoint / "golden_vision.safetensors")


@pytest.mark.parity
@pytest.mark.parity
@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_rows_equal_the_reference_at_every_grid_and_width(encoder_of, checkpoint, golden, tp):
    encoder = encoder_of(tp, (512,))
    width = encoder.out_hidden_size
    for name in GRIDS:
        rows = np.concatenate(encoder.encode_frames(golden_frames(checkpoint, golden, name)))
        for part, output in enumerate(("pooler_output", "deepstack0", "deepstack1")):
            error = relative_error(rows[:, part * width : (part + 1) * width], golden[f"{name}.{output}"])
            assert error < 5e-6, f"tp {tp}, {name}.{output}: relative error {error:.1e}"


def test_the_row_width_is_the_embedding_and_every_deepstack_level(encoder_of):
    encoder = encoder_of(1, (512,))
    assert (encoder.out_hidden_size, encoder.num_deepstack, encoder.row_width) == (64, 2, 64 * 3)
    assert encoder.pool.shape == (1024, 192)


def config_with(checkpoint, **changes):
    hf = json.loads((checkpoint / "config.json").read_text())
    hf["vision_config"] |= changes
    return hf


@pytest.mark.parametrize(("gh", "gw"), [(2, 4), (8, 6), (64, 16), (2, 2), (2, 14), (228, 2)])
def test_the_position_table_is_read_with_aligned_corners(checkpoint, gh, gw):
    config = read_config(config_with(checkpoint, num_position_embeddings=48 * 48))
    index, weight = position_taps(config, gh, gw)
    # A table that is linear in row and column is reproduced exactly by the right interpolation.
    row, column = np.divmod(np.arange(48 * 48), 48)
    read = np.stack([(t[index] * weight).sum(-1) for t in (row, column)], -1)
    ys, xs = np.linspace(0, 47, gh), np.linspace(0, 47, gw)
    want = np.stack(np.meshgrid(ys, xs, indexing="ij"), -1)
    want = want.reshape(gh // 2, 2, gw // 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    np.testing.assert_allclose(read, want, atol=1e-5)
    np.testing.assert_allclose(weight.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize(("gh", "gw"), [(1, 1), (1, 7), (7, 1)])
def test_an_axis_of_one_cell_reads_the_first_row_of_the_table(checkpoint, gh, gw):
    config = read_config(config_with(checkpoint, spatial_merge_size=1))
    index, weight = position_taps(config, gh, gw)
    assert np.isfinite(weight).all()
    assert index[0, 0] == 0
    assert weight[0].tolist() == [1, 0, 0, 0]


def test_a_family_without_a_tower_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model_type 'clip' has no vision tower here; supported: .*qwen3_vl"):
        family_of("clip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"num_position_embeddings": 60}, "60 is no square"),
        ({"num_heads": 5}, "hidden_size 48 over 5 heads"),
        ({"deepstack_visual_indexes": [4]}, r"\[4\] must lie in \[0, 4\)"),
        ({"in_channels": 1}, "in_channels is 1"),
        ({"depth": "4"}, "vision_config depth is '4'"),
    ],
)
def test_an_unusable_vision_config_is_refused_with_its_value(checkpoint, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(config_with(checkpoint, **changes))


def test_an_absent_field_is_named(checkpoint):
    hf = config_with(checkpoint)
    del hf["vision_config"]["depth"]
    with pytest.raises(ValueError, match="vision_config lacks 'depth'"):
        read_config(hf)
