"""The vision tower of GLM-5-Next (GLM-5.3-Flash): GLM-OCR's with every SwiGLU clamped, in the blocks and in the merger,
and a merger of its own width.

Implementations disagree on the epsilon of the query and key norms: transformers takes rms_norm_eps (1e-5), others 1e-6.
The default here is transformers'. To try another, set `qk_norm_eps` in vision_config, in the file or on an open
checkpoint before the encoder is made: `checkpoint.config["vision_config"]["qk_norm_eps"] = 1e-6`.

Source: GLM-5-Next as released in transformers.
"""

from collections.abc import Mapping
from typing import Any

from vitbatch.config import read_count, read_geometry, read_positive
from vitbatch.towers.glm_ocr import GlmOcrVisionConfig, GlmOcrVisionTower, read_norms_and_biases
from vitbatch.towers.registry import Family, register


def read_config(hf_config: Mapping[str, Any]) -> GlmOcrVisionConfig:
    """From a parsed config.json. Raises ValueError that names what is absent or unsupported."""
    fields = read_geometry(hf_config, activation="silu")
    vision = hf_config["vision_config"]
    return GlmOcrVisionConfig(
        **fields,
        **read_norms_and_biases(vision),
        merger_size=read_count(vision, "projection_intermediate_size", 10240),
        swiglu_limit=read_positive(vision, "swiglu_limit", 10.0),
    )


register(Family(read_config, GlmOcrVisionTower), "glm5_next")
