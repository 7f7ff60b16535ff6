"""Models with random weights, made on the device: for benchmarks that need a shape and no checkpoint."""

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save_file

from serving.models.config import text_config
from vitstripe.checkpoint import sharding_of

DIGITS_MODEL = Path(__file__).resolve().parents[2] / "serving" / "assets" / "digits_vlm"
IMAGE_TOKEN = 261  # of the tokenizer in DIGITS_MODEL, which every made-up model has

_QWEN3_VL_8B = {
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE_TOKEN,
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
_TINY_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 272,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
_TINY_VISION = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 3,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_GLM_5_2 = {  # widths of GLM-5.2, four layers, sixteen experts
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_TINY_GLM = {
    **_GLM_5_2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
    "vocab_size": 272,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 32,
}

_GLM_5_3_FLASH = {  # widths of GLM-5.3-Flash, eight layers, thirty-two experts
    "model_type": "glm5_next",
    "image_token_id": IMAGE_TOKEN,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm5_next_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "vocab_size": 154880,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
    },
    "vision_config": {
        "model_type": "glm5_next_vision",
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "projection_intermediate_size": 10240,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "hidden_act": "silu",
        "image_size": 336,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    },
}
_TINY_GLM5 = {
    **_GLM_5_3_FLASH,
    "text_config": {
        **_GLM_5_3_FLASH["text_config"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "linear_num_heads": 8,
        "linear_head_dim": 16,
        "vocab_size": 272,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "index_n_heads": 4,
        "index_head_dim": 16,
        # index_topk stays 2048: 512 pools, as the released model selects.
    },
    "vision_config": {
        **_GLM_5_3_FLASH["vision_config"],
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 3,
        "intermediate_size": 96,
        "projection_intermediate_size": 80,
        "out_hidden_size": 64,
    },
}

_TINY_QWEN3_5 = {
    **_QWEN3_VL_8B,
    "model_type": "qwen3_5",
    "text_config": {
        **_TINY_TEXT,
        "model_type": "qwen3_5_text",
        "max_position_embeddings": 262144,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    },
    "vision_config": {
        **{k: v for k, v in _QWEN3_VL_8B["vision_config"].items() if k != "deepstack_visual_indexes"},
        **{k: v for k, v in _TINY_VISION.items() if k != "deepstack_visual_indexes"},
        "model_type": "qwen3_5_vision",
    },
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "8b": _QWEN3_VL_8B,
    "tiny": {
        **_QWEN3_VL_8B,
        "text_config": _TINY_TEXT,
        "vision_config": {**_QWEN3_VL_8B["vision_config"], **_TINY_VISION},
    },
    "glm": _GLM_5_2,
    "tiny-glm": _TINY_GLM,
    "glm5": _GLM_5_3_FLASH,
    "tiny-glm5": _TINY_GLM5,
    "tiny-qwen35": _TINY_QWEN3_5,
}
"""config.json of every shape: Qwen3-VL-8B, GLM-5.2's widths with four layers and sixteen experts, GLM-5.3-Flash's with
eight layers and thirty-two experts, and a tiny one of each of these families and of Qwen3.5."""


def write_folder(folder: Path, shape: str) -> Path:
    """What a server reads of a checkpoint: config.json of a shape, a tokenizer, a chat template, image settings without
    bounds, and weights that `random_state` is to replace: there are none.

    Text is encoded as its bytes. All other ids of the vocabulary are words, so that whatever the model says is text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DIGITS_MODEL / name, folder)
    tokenizer = json.loads((DIGITS_MODEL / "tokenizer.json").read_text())
    # Added tokens keep their ids only if the vocabulary has them, too.
    words = tokenizer["model"]["vocab"]
    words |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words |= {f"w{i}": i for i in range(len(words), text_config(config)["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file({"none": np.zeros(1, np.float32)}, folder / "model.safetensors")
    settings = json.loads((DIGITS_MODEL / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 4096, "longest_edge": 16_777_216}
    if config["model_type"] == "glm5_next":
        settings |= {"image_processor_type": "Glm5NextImageProcessor", "patch_size": 14, "patch_expand_factor": 1}
        settings |= {"min_image_tokens": 4, "max_image_tokens": 16384}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@cache
def _maker(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, mean: float, size: float) -> Callable:
    def make(seed: jax.Array) -> jax.Array:
        return (mean + size * jax.random.normal(jax.random.key(seed, impl="rbg"), shape, jnp.float32)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def random_state(abstract: nnx.State, mesh: Mesh, axis: str = "tp") -> nnx.State:
    """The state of a module that was built under nnx.eval_shape: matrices of variance 1 / inputs, norms near 1, biases
    near 0. Nothing passes through the host."""
    made = []
    for path, variable in nnx.to_flat_state(abstract):
        value, name = variable.get_value(), ".".join(str(part) for part in path)
        if value.ndim > 1:
            mean, size = 0.0, value.shape[-1] ** -0.5
        else:
            mean, size = (1.0, 0.1) if name.endswith("weight") else (0.0, 0.1)
        make = _maker(value.shape, value.dtype, sharding_of(variable, mesh, axis), mean, size)
        made.append((path, variable.replace(make(np.uint32(zlib.crc32(name.encode()))))))
    return nnx.from_flat_state(made)
