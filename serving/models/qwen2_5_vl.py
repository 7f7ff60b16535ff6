"""The Qwen2.5-VL text decoder: biases on queries, keys and values, M-RoPE with one axis' angles after another's."""

from collections.abc import Mapping
from typing import Any

from serving.models.config import refuse, text_config
from serving.models.gqa import GqaConfig, family
from vitstripe.checkpoint import CheckpointError


def read_config(config: Mapping[str, Any]) -> GqaConfig:
    """Reads a qwen2_5_vl config.json. Raises CheckpointError naming the field."""
    c = text_config(config)
    refuse(c, "use_sliding_window", (False, None))
    kinds = set(c.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise CheckpointError(f"config.json: layer_types has {', '.join(sorted(kinds))}; only full_attention is built")
    return GqaConfig.from_hf(config, contiguous=True, bias=True, eps=1e-5)


FAMILY = family(read_config)
