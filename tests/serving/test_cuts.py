"""What a device of a mesh keeps of every kind of layer: a part of all that has heads, inner widths, rows of the
vocabulary or experts to divide, and the whole of the rest."""

import json

import jax.numpy as jnp
import pytest
from flax import nnx

from serving.models import families, family_of
from tests.helpers import GOLDENS
from tests.serving.glm5_next_reference import TINY

TP = 2
FIRST = {  # by rows: heads, inner width, vocabulary
    *("embed_tokens", "lm_head", "gate_proj", "up_proj"),
    *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"),
    *("q_conv1d", "k_conv1d", "v_conv1d", "f_b_proj", "g_b_proj", "b_proj", "A_log", "dt_bias"),
    *("q_conv", "k_conv", "v_conv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
LAST = {"o_proj", "out_proj", "down_proj"}  # by columns, what follows a part cut by rows
WHOLE = {
    *("norm", "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    *("q_norm", "k_norm", "o_norm", "q_a_layernorm", "kv_a_layernorm"),
    # Latents are the same on every device, and so is what chooses: tokens, experts, streams.
    *("q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj"),
    *("wq_b", "wk", "weights_proj", "index_kpool_compress_gate", "index_kpool_compress_ape"),
    *("gate", "shared_expert_gate", "hc_attn", "hc_ffn"),
}
BY_HEADS = {"k", "v", "state"}
LATENTS = {"latent", "index", "tail_keys", "tail_scores"}


def config_of(name: str) -> dict:
    folders = {"glm4v_moe": "text_variants/glm4v_moe", "qwen3_vl_moe": "text_variants/qwen3_vl_moe"}
    folders |= dict.fromkeys(("qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), "qwen3_5_moe_text")
    if name == "glm5_next":
        return TINY
    config = json.loads((GOLDENS / folders.get(name, name) / "config.json").read_text())
    # The mixture has three, which two devices would have to have all of.
    return config | ({"num_key_value_heads": 2} if folders.get(name) == "qwen3_5_moe_text" else {})


@pytest.mark.parametrize("name", families())
def test_all_that_divides_is_cut_and_the_rest_is_whole(name):
    config = config_of(name)
    decoder = nnx.eval_shape(lambda: family_of(config).build(config, TP, jnp.float32))
    wrong, seen = {}, set()
    for path, variable in nnx.to_flat_state(nnx.state(decoder)):
        names = [str(part) for part in path]
        module = next(part for part in reversed(names) if part in FIRST | LAST | WHOLE)
        axis = 0 if module in FIRST or "experts" in names else 1 if module in LAST else None
        seen.add("experts" if "experts" in names else module)
        if variable.get_metadata("tp_axis") != axis:
            wrong[".".join(names)] = variable.get_metadata("tp_axis")
    assert not wrong
    assert {"embed_tokens", "down_proj"} <= seen
    assert ("experts" in seen) == any("experts" in field for field in config.get("text_config", config)), seen


@pytest.mark.parametrize("name", families())
def test_caches_are_cut_with_the_heads_that_use_them(name):
    config = config_of(name)
    decoder = nnx.eval_shape(lambda: family_of(config).build(config, TP, jnp.float32))
    for layer in decoder.caches():
        for kind, array in layer.items():
            assert kind in BY_HEADS | LATENTS | {"conv"}
            channels = len(array.slot_shape) - 1
            assert array.cut == (None if kind in LATENTS else 0 if kind in BY_HEADS else channels), kind
