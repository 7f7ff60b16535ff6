"""The towers, by the model_type of config.json. A new family is one file here and one line in FAMILIES."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from vitbatch.config import VisionConfig
from vitbatch.towers import qwen3_vl


@dataclass(frozen=True)
class Family:
    """What the rest of the library needs to know of a family.

    read_config: parsed config.json -> VisionConfig. build: (config, dtype) -> tower, run under nnx.eval_shape.
    position_taps: (config, gh, gw) -> table rows int32 [N, taps] and weights float32 [N, taps] of a grid's patches.
    num_taps: their number, 0 for a tower without a table.
    """

    read_config: Callable[[Mapping[str, Any]], VisionConfig]
    build: Callable[[Any, Any], nnx.Module]
    position_taps: Callable[[VisionConfig, int, int], tuple[np.ndarray, np.ndarray]]
    num_taps: int


_QWEN3_VL = Family(qwen3_vl.read_config, qwen3_vl.Qwen3VLVisionTower, qwen3_vl.position_taps, num_taps=4)

FAMILIES: dict[str, Family] = {
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,  # the same tower before a mixture-of-experts language model
}


def family_of(model_type: str) -> Family:
    """Raises ValueError that lists the supported families."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no vision tower here; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
