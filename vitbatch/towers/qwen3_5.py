"""The vision tower of Qwen3.5, 3.6 and 3.8, dense or mixture-of-experts: Qwen3-VL's without deepstack.

Source: Qwen3.5 as released in transformers; later releases keep its model_type.
"""

from collections.abc import Mapping
from typing import Any

from vitbatch.config import read_count, read_geometry
from vitbatch.towers.qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionTower, position_taps
from vitbatch.towers.registry import Family, register


def read_config(hf_config: Mapping[str, Any]) -> Qwen3VLVisionConfig:
    """From a parsed config.json. Raises ValueError that names what is absent or unsupported."""
    fields = read_geometry(hf_config, activation="gelu_pytorch_tanh")
    vision = hf_config["vision_config"]
    if listed := vision.get("deepstack_visual_indexes"):
        raise ValueError(
            f"vision_config: deepstack_visual_indexes {listed} in a {fields['model_type']} checkpoint, whose tower has "
            f"no deepstack mergers; only qwen3_vl and qwen3_vl_moe have"
        )
    return Qwen3VLVisionConfig(**fields, num_position_embeddings=read_count(vision, "num_position_embeddings"))


FAMILY = Family(read_config, Qwen3VLVisionTower, position_taps, num_taps=4)

register(FAMILY, "qwen3_5", "qwen3_5_moe")
