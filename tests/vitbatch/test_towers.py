"""Every tower against the outputs of the reference implementation."""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from scripts.lib.rocm_lowering import KERNEL_CALLS, custom_calls_in, kernels_in, lower_for_rocm, rocm_mesh
from tests.helpers import GOLDENS, det, relative_error
from vitbatch import Bucket, BucketLadder, EncoderConfig, VisionEncoder
from vitbatch.checkpoint import bind_tower, image_processor, vision_config
from vitbatch.config import TINY_BLOCK
from vitbatch.encoder import Frame
from vitbatch.program import bucket_program, build_encode
from vitbatch.towers import family_of
from vitstripe import Program, make_mesh
from vitstripe.checkpoint import Checkpoint, load, raise_problems
from vitstripe.platform import Platform

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen4_exp", "glm4v", "glm46v", "glm_ocr", "glm5_next")
GRIDS = ("a_1x4x4", "b_1x6x10", "c_2x8x8", "d_mixed", "e_big_1x12x20")
BOUND = 5e-6
"""Relative to the largest value. A GELU of the other kind errs by 2e-4, an epsilon of 1e-5 for 1e-6 by 7e-6."""


@pytest.fixture(scope="module")
def tower_of() -> Callable[[str, int], VisionEncoder]:
    """tower_of(family, tp): an encoder of one bucket of 512 patches a lane, shared."""

    @cache
    def build(family: str, tp: int) -> VisionEncoder:
        opened, mesh = Checkpoint(GOLDENS / family), make_mesh(tp)
        binding = bind_tower(opened)
        raise_problems(opened, [binding])
        # The inputs are normalised rows, so whose processor it is does not matter.
        processor = image_processor(Checkpoint(GOLDENS / "qwen3_vl"))
        config = EncoderConfig(ladder=BucketLadder((512,)))
        state = load(opened, binding, mesh)
        return VisionEncoder(binding.graphdef, state, vision_config(opened), processor, mesh, "tp", config)

    return build


@cache
def golden_of(family: str) -> dict[str, np.ndarray]:
    return load_file(GOLDENS / family / "golden_vision.safetensors")


def golden_frames(family: str, name: str) -> list[Frame]:
    """A golden's input, one Frame for each frame of each image or video."""
    stated = json.loads((GOLDENS / family / "meta.json").read_text())["vision"][name]
    rows = det(tuple(stated["input_shape"]), stated["input_seed"])
    grids = [(gh, gw) for t, gh, gw in golden_of(family)[f"{name}.grid_thw"].tolist() for _ in range(t)]
    ends = np.cumsum([gh * gw for gh, gw in grids])
    return [Frame(rows[end - gh * gw : end], (gh, gw)) for end, (gh, gw) in zip(ends, grids, strict=True)]


def assert_equal_to_the_reference(encoder: VisionEncoder, family: str) -> None:
    golden, width = golden_of(family), encoder.out_hidden_size
    outputs = ["pooler_output"] + [f"deepstack{k}" for k in range(encoder.num_deepstack)]
    assert {key.partition(".")[2] for key in golden if "deepstack" in key} == set(outputs[1:])
    for name in GRIDS:
        rows = np.concatenate(encoder.encode_frames(golden_frames(family, name)))
        assert rows.shape[1] == width * len(outputs)
        for part, output in enumerate(outputs):
            error = relative_error(rows[:, part * width : (part + 1) * width], golden[f"{name}.{output}"])
            assert error < BOUND, f"{family}, tp {encoder.lanes}, {name}.{output}: relative error {error:.1e}"


@pytest.mark.parity
@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_the_reference_at_every_grid(tower_of, family, tp):
    assert_equal_to_the_reference(tower_of(family, tp), family)


@pytest.mark.parity
@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [4, 8])
def test_rows_equal_the_reference_on_wider_meshes(tower_of, tp):
    assert_equal_to_the_reference(tower_of("qwen3_vl", tp), "qwen3_vl")


def frame(family: str, gh: int, gw: int, seed: int) -> Frame:
    return Frame(det((gh * gw, vision_config(Checkpoint(GOLDENS / family)).patch_features), seed), (gh, gw))


@pytest.mark.multidevice
@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "glm5_next"])
def test_rows_have_the_same_bits_alone_or_in_company_and_anywhere_in_a_lane(tower_of, family):
    # 10x14 patches make ragged windows that lie across blocks of 64.
    image = frame(family, 10, 14, 1)
    company = [frame(family, 6, 10, 2), frame(family, 2, 2, 3), frame(family, 8, 8, 4)]
    encoder = tower_of(family, 1)
    (alone,) = encoder.encode_frames([image])
    for place in range(len(company) + 1):
        together = encoder.encode_frames([*company[:place], image, *company[place:]])
        np.testing.assert_array_equal(together[place], alone, err_msg=f"in place {place}")
    # Equal sizes keep their order, so the twin stands before the image in the lane.
    np.testing.assert_array_equal(encoder.encode_frames([frame(family, 14, 10, 5), image])[1], alone)
    np.testing.assert_array_equal(tower_of(family, 2).encode_frames([*company, image])[3], alone)


def lowered_for_rocm(family: str, tp: int, arch: str, block: int, dtype: Any) -> tuple[Program, str]:
    """A program of the family's tower, and its text."""
    opened, mesh = Checkpoint(GOLDENS / family), rocm_mesh(tp, arch)
    binding, vision = bind_tower(opened, dtype=dtype), vision_config(opened)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), binding.abstract)
    platform = Platform("rocm", arch, arch)
    encode = build_encode(binding.graphdef, state, vision, (0.5,) * 3, (0.25,) * 3, mesh, "tp", platform)
    pool = jax.ShapeDtypeStruct((100, vision.row_width), dtype, sharding=everywhere)
    taps = family_of(vision.model_type).num_taps
    program = bucket_program(encode, state, pool, vision, taps, mesh, "tp", Bucket(192, block))
    return program, lower_for_rocm(program, mesh)


ROCM_CASES = [*((family, 8, "gfx950") for family in FAMILIES), ("qwen3_vl", 1, "gfx942"), ("glm_ocr", 2, "gfx942")]


@pytest.mark.multidevice
@pytest.mark.parametrize(("family", "tp", "arch"), ROCM_CASES)
def test_a_bf16_program_lowers_for_rocm_with_the_kernel_and_one_all_gather(family, tp, arch):
    program, text = lowered_for_rocm(family, tp, arch, 64, jnp.bfloat16)
    collectives = re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)", text)
    assert Counter(collectives) == Counter(dict(program.collectives))
    assert sum(program.collectives.values()) == (tp > 1)
    assert "stablehlo.convolution" not in text
    assert "callback" not in text
    assert custom_calls_in(text) <= KERNEL_CALLS
    assert kernels_in(text) == {"packed_attention"} | ({"window_attention"} if family == "qwen2_5_vl" else set())


@pytest.mark.multidevice
def test_a_tiny_lane_lowers_for_rocm_as_plain_xla():
    _, text = lowered_for_rocm("qwen2_5_vl", 2, "gfx942", TINY_BLOCK, jnp.bfloat16)
    assert custom_calls_in(text) == set()


@pytest.mark.multidevice
def test_a_float32_program_lowers_for_rocm_without_the_kernel():
    _, text = lowered_for_rocm("qwen3_vl", 2, "gfx950", 64, jnp.float32)
    assert custom_calls_in(text) == set()
