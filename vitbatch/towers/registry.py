"""The families of towers by the model_type of config.json. Every family's file registers itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from vitbatch.config import VisionConfig


def no_position_taps(config: VisionConfig, gh: int, gw: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a tower without a position table."""
    return np.zeros((gh * gw, 0), np.int32), np.zeros((gh * gw, 0), np.float32)


@dataclass(frozen=True)
class Family:
    """What the rest of the library needs to know of a family.

    read_config: parsed config.json -> VisionConfig. build: (config, dtype) -> tower, run under nnx.eval_shape.
    position_taps: (config, gh, gw) -> table rows int32 [N, taps] and weights float32 [N, taps] of a grid's patches.
    num_taps: their number, 0 for a tower without a table.
    """

    read_config: Callable[[Mapping[str, Any]], VisionConfig]
    build: Callable[[Any, Any], nnx.Module]
    position_taps: Callable[[VisionConfig, int, int], tuple[np.ndarray, np.ndarray]] = no_position_taps
    num_taps: int = 0


FAMILIES: dict[str, Family] = {}


def register(family: Family, *model_types: str) -> None:
    """Makes a family known under the model_types that it serves. Raises ValueError for one that is taken."""
    for model_type in model_types:
        if model_type in FAMILIES:
            raise ValueError(f"model_type {model_type!r} has a vision tower already")
        FAMILIES[model_type] = family


def family_of(model_type: str) -> Family:
    """Raises ValueError that lists the supported families."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no vision tower here; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
