"""The GLM-OCR text decoder: that of GLM-4.1V without biases, with a head width of its own."""

from collections.abc import Mapping
from typing import Any

from serving.models.config import refuse, text_config
from serving.models.gqa import GqaConfig, family


def read_config(config: Mapping[str, Any]) -> GqaConfig:
    """Reads a glm_ocr config.json. Raises CheckpointError naming the field."""
    refuse(text_config(config), "attention_bias", (False, None))
    return GqaConfig.from_hf(config, contiguous=True, pairs=True, four_norms=True, eps=1e-5)


FAMILY = family(read_config)
