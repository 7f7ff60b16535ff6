"""From config.json and tensor names to a tower: every family, and what is refused."""

import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.helpers import GOLDENS
from vitbatch.checkpoint import bind_tower
from vitbatch.towers import FAMILIES, Family, family_of, register
from vitbatch.towers.glm_ocr import GlmOcrVisionConfig
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, CheckpointError, load, raise_problems, save_orbax

GOLDEN_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen4_exp", "glm4v", "glm46v", "glm_ocr", "glm5_next")


def config_with(family: str, **changes) -> dict:
    hf = json.loads((GOLDENS / family / "config.json").read_text())
    hf["vision_config"] |= changes
    return hf


def read(hf: dict):
    return family_of(hf["model_type"]).read_config(hf)


def test_these_model_types_have_towers():
    assert set(FAMILIES) == {
        *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        *("glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr", "glm5_next"),
    }


def test_a_model_type_without_a_tower_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"model_type 'clip' has no vision tower here; supported: .*glm4v, .*qwen3_vl"):
        family_of("clip")


def test_a_model_type_is_registered_once():
    with pytest.raises(ValueError, match="'glm_ocr' has a vision tower already"):
        register(family_of("glm4v"), "glm_ocr")


def test_a_family_from_outside_is_found_by_its_model_type(monkeypatch):
    mine = Family(family_of("qwen3_5").read_config, family_of("qwen3_5").build)
    monkeypatch.setattr("vitbatch.towers.registry.FAMILIES", {})
    register(mine, "mine")
    assert family_of("mine") is mine


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
def test_a_tower_takes_every_vision_tensor_and_nothing_else(family):
    opened = Checkpoint(GOLDENS / family)
    binding = bind_tower(opened)
    assert binding.problems == []
    taken = [source.tensor for found in binding.sources.values() for source in found]
    assert sorted(taken) == sorted(name for name in opened.tensors if "visual." in name)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("qwen2_5_vl", "visual.merger.mlp.2.bias"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.1.norm.weight"),
        ("qwen3_5", "model.visual.pos_embed.weight"),
        ("qwen4_exp", "model.visual.patch_embed.proj.bias"),
        ("glm4v", "model.visual.post_conv_layernorm.weight"),
        ("glm46v", "model.visual.embeddings.position_embedding.weight"),
        ("glm_ocr", "model.visual.blocks.3.attn.k_norm.weight"),
        ("glm5_next", "model.visual.downsample.weight"),
    ],
)
def test_missing_and_unknown_tensors_are_named_together(tmp_path, family, tensor):
    tensors = load_file(GOLDENS / family / "model.safetensors")
    tensors[f"{tensor}_scale"] = tensors.pop(tensor)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDENS / family / "config.json", tmp_path)
    opened = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        raise_problems(opened, [bind_tower(opened)])
    shape = list(tensors[f"{tensor}_scale"].shape)
    assert f"missing   model.visual.{tensor.rpartition('visual.')[2]} {shape}" in str(caught.value)
    assert f"unknown   {tensor}_scale {shape}" in str(caught.value)


def test_the_downsample_kernel_is_turned_into_rows_of_patches():
    opened = Checkpoint(GOLDENS / "glm4v")
    state = nnx.to_pure_dict(load(opened, bind_tower(opened), make_mesh(1)))
    kernel = opened.read("model.visual.downsample.weight").astype(np.float32)
    got = np.asarray(state["downsample"]["weight"]).reshape(64, 2, 2, 48)
    np.testing.assert_array_equal(got, kernel.transpose(0, 2, 3, 1))


def test_an_orbax_folder_holds_the_turned_kernel(tmp_path):
    opened = Checkpoint(GOLDENS / "glm4v")
    binding, mesh = bind_tower(opened), make_mesh(2)
    state = load(opened, binding, mesh)
    save_orbax(tmp_path / "orbax", opened, {"vision": state})
    copy = Checkpoint(tmp_path / "orbax")
    restored = load(copy, bind_tower(copy), mesh)
    want = dict(nnx.to_flat_state(state))
    got = dict(nnx.to_flat_state(restored))
    assert got.keys() == want.keys()
    for path, variable in want.items():
        np.testing.assert_array_equal(got[path].get_value(), variable.get_value(), err_msg=str(path))


QWEN = {"patch_size": 16, "num_position_embeddings": 2304}
GLM = {"patch_size": 14, "image_size": 448, "projection_intermediate_size": 10240, "swiglu_limit": 10.0}
GLM4V = {"depth": 24, "hidden_size": 1536, "num_heads": 12, "intermediate_size": 13696, "out_hidden_size": 4096}
GLM5 = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 4096}


@pytest.mark.parametrize(
    ("family", "vision", "tensors", "millions"),
    [
        ("qwen3_5", QWEN | {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072}, 153, 87.4),
        ("qwen3_5", QWEN | {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}, 297, 305.5),
        ("qwen3_5", QWEN | {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304}, 333, 415.0),
        ("glm5_next", GLM | GLM5, 347, None),
        ("glm4v", GLM | GLM4V | {"image_size": 336}, 181, None),
    ],
)
def test_released_geometries_give_towers_of_their_known_size(family, vision, tensors, millions):
    """Sizes without the merger as timm states them; 347 tensors are what GLM-5.3-Flash has."""
    config = read(config_with(family, **vision))
    tower = nnx.eval_shape(lambda: family_of(family).build(config, jnp.bfloat16))
    flat = dict(nnx.to_flat_state(nnx.state(tower)))
    assert len(flat) == tensors
    if millions:
        size = sum(math.prod(v.get_value().shape) for path, v in flat.items() if path[0] != "merger")
        # timm's towers are for images: the two frames of the patch kernel are one there.
        size -= math.prod(flat["patch_embed", "proj", "weight"].get_value().shape) // 2
        assert size / 1e6 == pytest.approx(millions, abs=0.05)


def test_query_and_key_norms_take_the_epsilon_of_the_others_unless_given_one():
    plain = read(config_with("glm5_next", rms_norm_eps=3e-5))
    assert isinstance(plain, GlmOcrVisionConfig)
    assert (plain.rms_norm_eps, plain.qk_norm_eps) == (3e-5, 3e-5)
    apart = read(config_with("glm5_next", qk_norm_eps=1e-6))
    assert isinstance(apart, GlmOcrVisionConfig)
    assert (apart.rms_norm_eps, apart.qk_norm_eps) == (1e-5, 1e-6)
    tower = nnx.eval_shape(lambda: family_of("glm5_next").build(apart, jnp.float32))
    block = tower.blocks[0]
    assert [n.eps for n in (block.norm1, block.norm2, block.attn.q_norm, block.attn.k_norm)] == [1e-5, 1e-5, 1e-6, 1e-6]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *((family, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported") for family in GOLDEN_FAMILIES),
        *((family, {"depth": "4"}, "vision_config depth is '4'") for family in GOLDEN_FAMILIES),
        ("qwen3_vl", {"num_position_embeddings": 60}, "num_position_embeddings 60 is no square"),
        ("qwen3_vl", {"num_heads": 5}, "hidden_size 48 over 5 heads"),
        ("qwen3_vl", {"deepstack_visual_indexes": [4]}, r"\[4\] must lie in \[0, 4\)"),
        ("qwen3_vl", {"deepstack_visual_indexes": "all"}, "deepstack_visual_indexes is 'all'"),
        ("qwen3_vl", {"in_channels": 1}, "in_channels is 1"),
        ("qwen3_vl", {"spatial_merge_size": 3}, "spatial_merge_size 3 makes tokens of 9 patches"),
        ("qwen3_vl", {"rope_parameters": {"rope_theta": "big"}}, "rope_theta is 'big'"),
        ("qwen3_5", {"deepstack_visual_indexes": [1]}, r"\[1\] in a qwen3_5 checkpoint, whose tower has no deepstack"),
        ("qwen2_5_vl", {"window_size": 27}, "window_size 27 is under one token of 28 pixels"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [1, 9]}, r"fullatt_block_indexes \[1, 9\] must lie in \[0, 4\)"),
        ("glm4v", {"image_size": 13}, "image_size 13 is under one patch of 14 px"),
        ("glm4v", {"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a positive number"),
        ("glm_ocr", {"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ("glm5_next", {"swiglu_limit": -1.0}, "swiglu_limit is -1.0"),
        ("glm5_next", {"qk_norm_eps": math.nan}, "qk_norm_eps is nan"),
        ("glm5_next", {"projection_intermediate_size": 0}, "projection_intermediate_size is 0"),
    ],
)
def test_an_unusable_vision_config_is_refused_with_field_and_value(family, changes, message):
    with pytest.raises(ValueError, match=message):
        read(config_with(family, **changes))


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3_vl", "depth"),
        ("qwen3_vl", "deepstack_visual_indexes"),
        ("qwen3_5", "num_position_embeddings"),
        ("qwen2_5_vl", "fullatt_block_indexes"),
        ("qwen2_5_vl", "window_size"),
        ("glm4v", "image_size"),
        ("glm_ocr", "out_hidden_size"),
    ],
)
def test_an_absent_field_is_named(family, field):
    hf = config_with(family)
    del hf["vision_config"][field]
    with pytest.raises(ValueError, match=f"vision_config lacks '{field}'"):
        read(hf)


def test_a_config_without_a_tower_is_refused():
    with pytest.raises(ValueError, match="the top level lacks 'vision_config'"):
        family_of("glm_ocr").read_config({"model_type": "glm_ocr"})
    with pytest.raises(ValueError, match="vision_config is a list, not an object"):
        family_of("glm_ocr").read_config({"model_type": "glm_ocr", "vision_config": []})
