"""Decoder language models: one file a family, found by config.json's model_type."""

from collections.abc import Mapping
from typing import Any

from serving.models.config import field, text_config
from serving.models.decoder import Decoder, Family
from vitstripe.checkpoint import WRONG_KIND, Binding, Checkpoint, CheckpointError, bind

__all__ = ["Decoder", "bind_decoder", "families", "family_of"]


def families() -> dict[str, Family]:
    """Every decoder family, by the model_type of config.json."""
    from serving.models import glm4v, glm5_next, glm_moe_dsa, glm_ocr, qwen2_5_vl, qwen3_5, qwen3_vl

    return {
        "qwen3_vl": qwen3_vl.FAMILY,
        "qwen3_vl_moe": qwen3_vl.FAMILY,
        "qwen2_5_vl": qwen2_5_vl.FAMILY,
        "qwen3_5": qwen3_5.FAMILY,
        "qwen3_5_moe": qwen3_5.FAMILY,
        "qwen3_5_text": qwen3_5.FAMILY,
        "qwen3_5_moe_text": qwen3_5.FAMILY,
        "glm4v": glm4v.FAMILY,
        "glm4v_moe": glm4v.FAMILY,
        "glm46v": glm4v.FAMILY,
        "glm_ocr": glm_ocr.FAMILY,
        "glm5_next": glm5_next.FAMILY,
        "glm_moe_dsa": glm_moe_dsa.FAMILY,
        "deepseek_v32": glm_moe_dsa.FAMILY,
    }


def family_of(config: Mapping[str, Any]) -> Family:
    """The decoder family of a config.json. Raises CheckpointError naming the known ones."""
    known, kind = families(), config.get("model_type")
    if kind not in known:
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported; known: {', '.join(sorted(known))}")
    return known[kind]


def _layer_of(tensor: str) -> int:
    """The number of the layer that a tensor belongs to, -1 for none."""
    parts = tensor.split(".")
    number = parts[parts.index("layers") + 1] if "layers" in parts[:-1] else ""
    return int(number) if number.isdigit() else -1


def bind_decoder(checkpoint: Checkpoint, *, tp: int, dtype) -> Binding:
    """Builds the decoder abstractly for `tp` devices and finds its tensors; reads nothing. Raises CheckpointError for
    what the family does not load; tensors that are missing or unknown are the binding's problems."""
    family = family_of(checkpoint.config)
    text = text_config(checkpoint.config)
    layers = field(text, "num_hidden_layers")
    # Some configurations do not count them; eh_proj, which joins an embedding and a hidden row, is theirs alone.
    speculative = {_layer_of(tensor) for tensor in checkpoint.tensors if ".eh_proj." in tensor}
    speculative |= {*range(layers, layers + field(text, "num_nextn_predict_layers", int, 0))}

    def predicts_ahead(tensor: str) -> bool:
        # Multi-token-prediction layers follow the decoder's own; this server does not use them.
        return (layer := _layer_of(tensor)) >= layers and layer in speculative

    def build():
        try:
            return family.build(checkpoint.config, tp, dtype)
        except WRONG_KIND as error:
            raise CheckpointError(f"config.json: a field has a value of the wrong kind: {error}") from error

    for tensor in checkpoint.tensors:
        if reason := family.why_not(tensor):
            raise CheckpointError(f"{checkpoint.folder}: {reason}")
    return bind(
        checkpoint,
        build,
        name="text",
        disk_names=family.disk_names,
        owns=family.owns,
        ignore=lambda t: t.startswith("mtp.") or predicts_ahead(t) or family.ignore(t),
    )
