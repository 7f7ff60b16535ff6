"""config.json of every supported family at the widths of a released model, with few layers.

The layouts are those of the small checkpoints under tests/goldens; a released model differs from them in numbers only.
What a program holds does not depend on how many layers of a kind there are, so one or two of each kind stand for all.
"""

import json
from pathlib import Path
from typing import Any

_LAYOUTS = Path(__file__).parents[2] / "tests" / "goldens"

_QWEN_TOWER = {
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
}
_GLM4_TOWER = {
    "hidden_size": 1536,
    "num_heads": 12,
    "intermediate_size": 13696,
    "out_hidden_size": 4096,
    "image_size": 336,
}
_GLM_TOWER = {"hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 4096}
_TEXT_4096 = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
_DSA = {
    "max_position_embeddings": 1048576,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}
_QWEN3_5_TEXT = {
    **_TEXT_4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_type": "default",
    },
}

_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {  # 7B
        "vision_config": {
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "window_size": 112,
        },
        "text_config": {
            **_TEXT_4096,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1000000.0, "rope_type": "default"},
        },
    },
    "qwen3_vl": {  # 8B
        "vision_config": _QWEN_TOWER,
        "text_config": {
            **_TEXT_4096,
            "rope_parameters": {"mrope_section": [24, 20, 20], "rope_theta": 5000000.0, "rope_type": "default"},
        },
    },
    "qwen3_5": {"vision_config": _QWEN_TOWER, "text_config": _QWEN3_5_TEXT},  # 9B
    "qwen3_5_moe_text": {  # the decoder of 35B-A3B
        **_QWEN3_5_TEXT,
        "hidden_size": 2048,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 2,
    },
    "qwen4_exp": {"vision_config": _QWEN_TOWER, "text_config": {**_QWEN3_5_TEXT, "indexer_head_dim": 128}},
    "glm4v": {  # GLM-4.1V-9B
        "vision_config": _GLM4_TOWER,
        "text_config": {
            **_TEXT_4096,
            "num_key_value_heads": 2,
            "intermediate_size": 13696,
            "vocab_size": 151552,
            "rope_parameters": {
                "mrope_section": [8, 12, 12],
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
        },
    },
    "glm_ocr": {
        "vision_config": {**_GLM_TOWER, "out_hidden_size": 1536},
        "text_config": {
            "hidden_size": 1536,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 4608,
            "vocab_size": 59392,
            "max_position_embeddings": 131072,
            "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "qwen3_vl_moe": {  # 30B-A3B; layer 0 stays dense, as in no released one, so that both kinds are there
        "vision_config": {**_QWEN_TOWER, "depth": 2, "out_hidden_size": 2048, "deepstack_visual_indexes": [0]},
        "text_config": {
            **_TEXT_4096,
            "hidden_size": 2048,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "rope_parameters": {"mrope_section": [24, 20, 20], "rope_theta": 5000000.0, "rope_type": "default"},
        },
    },
    "glm4v_moe": {  # GLM-4.5V
        "vision_config": {**_GLM4_TOWER, "depth": 2},
        "text_config": {
            **_TEXT_4096,
            "num_attention_heads": 96,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151552,
            "rope_parameters": {
                "mrope_section": [8, 12, 12],
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
        },
    },
    "glm5_next": {  # GLM-5.3-Flash
        "vision_config": {**_GLM_TOWER, "projection_intermediate_size": 10240, "swiglu_limit": 10.0},
        "text_config": {
            **_DSA,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 256,
            "qk_rope_head_dim": 0,
            "qk_head_dim": 256,
            "v_head_dim": 256,
            "linear_num_heads": 64,
            "linear_head_dim": 128,
            "index_n_heads": 32,
            "intermediate_size": 12288,
            "n_routed_experts": 288,
            "vocab_size": 154880,
        },
    },
    "glm_moe_dsa": {  # GLM-5.2
        **_DSA,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "intermediate_size": 12288,
        "vocab_size": 154880,
    },
    "deepseek_v32": {
        **_DSA,
        "max_position_embeddings": 163840,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "n_group": 8,
        "topk_group": 4,
        "intermediate_size": 18432,
        "vocab_size": 129280,
    },
}

MODEL_TYPES = tuple(_SIZES)
"""The model_types that `config_of` knows. Others that are registered for the same code need no entry of their own."""

ANOTHER_S_TOWER = ("qwen3_vl_moe", "glm4v_moe")
"""Those that have the tower of a model_type above, so that only their decoders are of interest."""


def config_of(model_type: str) -> dict[str, Any]:
    """A parsed config.json. Raises KeyError for a model_type without sizes here."""
    sizes = _SIZES[model_type]
    folder = _LAYOUTS / ("text_variants" if model_type in ANOTHER_S_TOWER else "") / model_type
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, value in sizes.items():
        config[name] = {**config[name], **value} if name in ("vision_config", "text_config") else value
    return config
