"""Decoder language models: one file a family, found by config.json's model_type."""

from collections.abc import Mapping
from typing import Any

from serving.models.decoder import Decoder, Family
from vitstripe.checkpoint import Binding, Checkpoint, CheckpointError, bind

__all__ = ["Decoder", "bind_decoder", "family_of"]


def _families() -> dict[str, Family]:
    from serving.models import glm_moe_dsa, qwen3_vl

    return {"qwen3_vl": qwen3_vl.FAMILY, "glm_moe_dsa": glm_moe_dsa.FAMILY}


def family_of(config: Mapping[str, Any]) -> Family:
    """The decoder family of a config.json. Raises CheckpointError naming the known ones."""
    families, kind = _families(), config.get("model_type")
    if kind not in families:
        raise CheckpointError(
            f"config.json: model_type {kind!r} is not supported; known: {', '.join(sorted(families))}"
        )
    return families[kind]


def bind_decoder(checkpoint: Checkpoint, *, tp: int, dtype) -> Binding:
    """Builds the decoder abstractly for `tp` devices and finds its tensors; reads nothing."""
    family = family_of(checkpoint.config)
    layers = checkpoint.config.get("text_config", checkpoint.config).get("num_hidden_layers", 0)

    def beyond_last_layer(tensor: str) -> bool:
        # Checkpoints keep multi-token-prediction layers after the decoder's; this server does not use them.
        parts = tensor.split(".")
        at = parts.index("layers") + 1 if "layers" in parts[:-1] else 0
        return at > 0 and parts[at].isdigit() and int(parts[at]) >= layers

    return bind(
        checkpoint,
        lambda: family.build(checkpoint.config, tp, dtype),
        name="text",
        disk_names=family.disk_names,
        owns=family.owns,
        ignore=lambda t: t.startswith("mtp.") or beyond_last_layer(t) or family.ignore(t),
    )
