"""The Qwen3-VL text decoder, dense or with experts: norms over the heads of queries and keys, interleaved M-RoPE, and
deepstack rows of the images added after the first layers."""

from collections.abc import Mapping
from typing import Any

from serving.models.config import field, positive, refuse, text_config
from serving.models.gqa import GqaConfig, family
from serving.models.moe import MoEConfig
from vitstripe.checkpoint import CheckpointError


def read_config(config: Mapping[str, Any]) -> GqaConfig:
    """Reads a qwen3_vl or qwen3_vl_moe config.json. Raises CheckpointError naming the field."""
    c = text_config(config)
    refuse(c, "attention_bias", (False,))
    mixture = {}
    if config.get("model_type") == "qwen3_vl_moe":
        mixture = {"sparse_mlp": _sparse_layers(c), "moe": MoEConfig.softmax(c)}
    return GqaConfig.from_hf(
        config,
        contiguous=False,
        qk_norm=True,
        num_deepstack=len(config.get("vision_config", {}).get("deepstack_visual_indexes", ())),
        **mixture,
    )


def _sparse_layers(c: Mapping[str, Any]) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer has experts, but not those that mlp_only_layers names."""
    layers, every = positive(c, "num_hidden_layers"), positive(c, "decoder_sparse_step", 1)
    dense = field(c, "mlp_only_layers", list, [])
    if not all(isinstance(i, int) for i in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r}; it must be a list of layer numbers")
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(layers))


FAMILY = family(read_config)
