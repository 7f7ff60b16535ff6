"""Tensors of a checkpoint that the server has no use for: known ones are left alone, others are named."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serving.models import bind_decoder
from tests.helpers import GOLDENS
from tests.serving.harness import checkpoint_at


def problems(folder, family: str, more: list[str], **fields) -> list[str]:
    """What binding the family's golden says when its file holds these tensors besides."""
    held = load_file(GOLDENS / family / "model.safetensors") | {name: np.ones((3, 2), np.float32) for name in more}
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_bytes((GOLDENS / family / "config.json").read_bytes())
    return bind_decoder(checkpoint_at(folder, **fields), tp=2, dtype=jnp.float32).problems


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("glm5_next", ["model.language_model.layers.2.eh_proj.weight", "model.language_model.layers.2.mlp.gate.bias"]),
        ("glm5_next", ["model.language_model.hc_head_fn", "model.language_model.layers.2.shared_head.norm.weight"]),
        ("qwen3_5", ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.visual.merger.linear_fc9.weight"]),
        ("deepseek_v32", ["model.layers.2.eh_proj.weight", "model.layers.2.self_attn.indexer.wk.weight"]),
        ("qwen3_vl", ["model.language_model.rotary_emb.inv_freq"]),
    ],
)
def test_speculative_layers_heads_of_them_and_tables_are_left_alone(tmp_path, family, more):
    assert problems(tmp_path, family, more) == []


def test_speculative_layers_may_be_counted_in_the_config(tmp_path):
    layer = "model.layers.3.mlp.down_proj.weight"
    assert problems(tmp_path, "glm_moe_dsa", [layer]) == [f"unknown   {layer} [3, 2]"]
    assert problems(tmp_path, "glm_moe_dsa", [layer], num_nextn_predict_layers=1) == []


def test_a_tensor_of_a_layer_of_the_decoder_is_named_when_nothing_uses_it(tmp_path):
    found = problems(tmp_path, "qwen3_5", ["model.language_model.layers.0.linear_attn.in_proj_c.weight"])
    assert found == ["unknown   model.language_model.layers.0.linear_attn.in_proj_c.weight [3, 2]"]
