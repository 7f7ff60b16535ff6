"""Decoder language models: one file a family, found by config.json's model_type."""

from collections.abc import Mapping
from typing import Any

from dsa_indexer import KeyFormat
from serving.config import EngineConfig
from serving.models.config import field, text_config
from serving.models.decoder import IN_WEIGHTS_DTYPE, WEIGHTS_DTYPE, CacheFormats, Decoder, Family
from vitstripe.checkpoint import WRONG_KIND, Binding, Checkpoint, CheckpointError, bind
from vitstripe.platform import Platform

__all__ = ["Decoder", "bind_decoder", "cache_formats", "families", "family_of"]


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


def cache_formats(config: Mapping[str, Any], engine: EngineConfig, platform: Platform) -> CacheFormats:
    """How a config.json's model keeps what `engine` says of index_keys and latent_cache.

    Raises ValueError for float8 where the model has no such cache or the platform has no float8.
    """

    def form(name: str, asked: str, what: str, lacks: str) -> KeyFormat:
        if asked == "auto":
            return WEIGHTS_DTYPE
        if not family_of(config).has_indexer:
            others = ", ".join(sorted(name for name, family in families().items() if family.has_indexer))
            raise ValueError(
                f"{name} is {asked!r}, but model_type {config['model_type']!r} has no {lacks} and so no {what}; these "
                f"have: {others}"
            )
        try:
            return KeyFormat.fp8(platform.arch)
        except ValueError as error:
            raise ValueError(
                f"{name} is {asked!r}, but {platform.arch} has no float8 that this server knows; 'auto' keeps them in "
                f"the dtype of the weights"
            ) from error

    return CacheFormats(
        form("index_keys", engine.index_keys, "index keys", "indexer"),
        form("latent_cache", engine.latent_cache, "latents", "latent attention"),
    )


def _layer_of(tensor: str) -> int:
    """The number of the layer that a tensor belongs to, -1 for none."""
    parts = tensor.split(".")
    number = parts[parts.index("layers") + 1] if "layers" in parts[:-1] else ""
    return int(number) if number.isdigit() else -1


def bind_decoder(checkpoint: Checkpoint, *, tp: int, dtype, formats: CacheFormats = IN_WEIGHTS_DTYPE) -> Binding:
    """Builds the decoder abstractly for `tp` devices and finds its tensors; reads nothing. formats: see
    `cache_formats`. Raises CheckpointError for what the family does not load; tensors that are missing or unknown
    are the binding's problems."""
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
            more = (formats,) if family.has_indexer else ()
            return family.build(checkpoint.config, tp, dtype, *more)
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
