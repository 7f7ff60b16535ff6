"""The geometry of a tower of which a test says only what matters to it."""

from typing import Any

from vitbatch import VisionConfig


def tower(**geometry: Any) -> VisionConfig:
    """Two blocks of width 48 over patches of 16 px, but for what is given."""
    known: dict[str, Any] = {
        "model_type": "made_up",
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 2,
        "intermediate_size": 96,
        "out_hidden_size": 64,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "in_channels": 3,
        "rope_theta": 10000.0,
        "deepstack_indexes": (),
    }
    return VisionConfig(**{**known, **geometry})
