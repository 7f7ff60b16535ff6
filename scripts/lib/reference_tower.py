"""A vision tower as transformers computes it, in float32 on the CPU, and the inputs it is compared on.

The one place of this project that imports torch and transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from vitbatch import VisionConfig

Grid = tuple[int, int, int]
"""Frames, rows and columns; of patches unless a text says cells."""

# In merged cells. Square and not, a video, several images in a call, and windows that lie across attention blocks.
_CELLS: dict[str, tuple[Grid, ...]] = {
    "a": ((1, 2, 2),),
    "b": ((1, 3, 5),),
    "c": ((2, 4, 4),),
    "d_mixed": ((1, 2, 2), (1, 3, 5), (1, 1, 1), (1, 8, 2), (2, 4, 4), (1, 5, 3)),
    "e": ((1, 6, 10),),
    "f": ((1, 5, 7),),
}

# Their towers in transformers take one frame an entry and fail on videos; their video path cuts them like this.
_FRAME_BY_FRAME = ("glm4v", "glm4v_moe", "glm46v", "glmga")


def grids(config: VisionConfig) -> dict[str, list[Grid]]:
    """name -> (t, gh, gw) of each image or video. The names of single ones say their size: b_1x6x10."""
    merge, found = config.merge_size, {}
    for name, cells in _CELLS.items():
        patches = [(t, rows * merge, columns * merge) for t, rows, columns in cells]
        full = f"{name}_{'x'.join(map(str, patches[0]))}" if len(patches) == 1 else name
        found[full] = patches
    return found


def frame_grids(images: list[Grid]) -> list[tuple[int, int]]:
    """(gh, gw) of every frame, in order."""
    return [(gh, gw) for t, gh, gw in images for _ in range(t)]


def exact_inputs(shape: tuple[int, int], seed: int) -> np.ndarray:
    """float32 values in [-1, 1) that are the same on every machine, so that they need not be stored.

    Element i is the top 24 bits of a 32-bit integer hash of i + 1000003 * seed.
    """
    mask = np.uint64(0xFFFFFFFF)
    h = np.arange(shape[0] * shape[1], dtype=np.uint64) + (np.uint64(seed * 1000003) & mask)
    for factor, shift in ((2654435761, 15), (2246822519, 13), (3266489917, 16)):
        h = (h * np.uint64(factor)) & mask
        h ^= h >> np.uint64(shift)
    return ((h >> np.uint64(8)).astype(np.float64) / 2**23 - 1).astype(np.float32).reshape(shape)


def inputs_of(config: VisionConfig) -> dict[str, tuple[list[Grid], np.ndarray, int]]:
    """name -> grids, normalised patch rows of all their frames, seed of the rows."""
    found = {}
    for number, (name, images) in enumerate(grids(config).items()):
        patches = sum(t * gh * gw for t, gh, gw in images)
        found[name] = (images, exact_inputs((patches, config.patch_features), 10 + number), 10 + number)
    return found


class ReferenceTower:
    """transformers' tower for the config.json in `folder`, eager attention, its parameters made at random by
    transformers."""

    def __init__(self, folder: Path):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        self.model_type: str = config.model_type
        tower = transformers.AutoModel.from_config(
            config.vision_config, attn_implementation="eager", dtype=torch.float32
        )
        self.tower: Any = tower.eval()

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """tensors: by name below `visual.`. Raises RuntimeError that lists names and shapes that do not fit."""
        state = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in tensors.items()}
        self.tower.load_state_dict(state, strict=True)

    def draw(self, seed: int) -> dict[str, np.ndarray]:
        """New random parameters, rounded to bfloat16: every one of them differs from its default, norms and biases
        too, and matrices keep the scale of what they read. Returns them, and leaves them in the tower."""
        generator = np.random.default_rng(seed)
        drawn = {}
        for name, value in self.tower.state_dict().items():
            noise = generator.standard_normal(tuple(value.shape))
            if value.ndim <= 1:
                noise = value.numpy() + 0.2 * noise
            elif "pos" in name:
                noise = 0.5 * noise
            else:
                noise = noise / np.sqrt(noise[0].size)
            rounded = torch.from_numpy(noise.astype(np.float32)).to(torch.bfloat16).float()
            drawn[name] = rounded.numpy()
        self.load(drawn)
        return drawn

    def run(self, images: list[Grid], rows: np.ndarray) -> dict[str, np.ndarray]:
        """pooler_output [T, O], and deepstack0, deepstack1, ... of a tower that has them."""
        if self.model_type in _FRAME_BY_FRAME:
            images = [(1, gh, gw) for gh, gw in frame_grids(images)]
        with torch.no_grad():
            out = self.tower(torch.from_numpy(rows), grid_thw=torch.tensor(images))
        levels = getattr(out, "deepstack_features", None) or []
        return {"pooler_output": out.pooler_output.numpy()} | {f"deepstack{i}": x.numpy() for i, x in enumerate(levels)}


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}
