"""The GLM-4V text decoders (GLM-4.1V, GLM-4.5V, GLM-4.6V): four norms a layer in the dense ones; in those with experts
two, and another rotation. What a checkpoint has is said by its text part, not by its name."""

from collections.abc import Mapping
from typing import Any

from serving.models.config import field, positive, refuse, sparse_layers, text_config
from serving.models.gqa import GqaConfig, family
from serving.models.moe import MoEConfig
from vitstripe.checkpoint import CheckpointError

_DENSE, _MIXTURE = ("glm4v_text", "glm4v"), ("glm4v_moe_text", "glm4v_moe")


def read_config(config: Mapping[str, Any]) -> GqaConfig:
    """Reads a glm4v, glm4v_moe or glm46v config.json. Raises CheckpointError naming the field."""
    c = text_config(config)
    kind = c.get("model_type")
    if kind in _DENSE:
        return GqaConfig.from_hf(config, contiguous=True, bias=True, pairs=True, four_norms=True, eps=1e-5)
    if kind not in _MIXTURE:
        known = ", ".join((*_DENSE, *_MIXTURE))
        raise CheckpointError(f"config.json: text_config has model_type {kind!r}; known here: {known}")
    refuse(c, "use_qk_norm", (False, None))
    layers = positive(c, "num_hidden_layers")
    types = c.get("mlp_layer_types")
    dense = field(c, "first_k_dense_replace", int, 1)
    sparse = tuple(i >= dense for i in range(layers)) if types is None else sparse_layers(c, layers)
    return GqaConfig.from_hf(
        config,
        contiguous=True,
        bias=field(c, "attention_bias", bool, True),
        eps=1e-5,
        partial=0.5,
        sparse_mlp=sparse,
        moe=MoEConfig.sigmoid(c),
    )


FAMILY = family(read_config)
