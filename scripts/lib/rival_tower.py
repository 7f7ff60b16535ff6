"""transformers' vision tower with the weights of a checkpoint folder, with the attention it prefers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

PREFIX = "model.visual."


class RivalTower:
    """On the CPU in float32, or on a GPU of torch's in bfloat16."""

    def __init__(self, folder: Path):
        transformers.logging.set_verbosity_error()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).vision_config
        tower = transformers.AutoModel.from_config(config, attn_implementation="sdpa", dtype=self.dtype)
        tensors = load_file(folder / "model.safetensors")
        tower.load_state_dict({name.removeprefix(PREFIX): value for name, value in tensors.items()}, strict=True)
        self.tower = tower.eval().to(self.device)
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}, {self.device}"

    def encode(self, rows: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
        """rows: uint8 pixels of one frame, all images' patches one after the other. Returns float32 [tokens, O]."""
        with torch.inference_mode():
            pixels = torch.from_numpy(rows).to(self.device).view(len(rows), 3, 1, -1)
            pixels = ((pixels.to(torch.float32) - 127.5) / 127.5).expand(-1, -1, 2, -1)
            grid_thw = torch.tensor([(1, *grid) for grid in grids], device=self.device)
            out = self.tower(pixels.reshape(len(rows), -1).to(self.dtype), grid_thw=grid_thw)
            return out.pooler_output.float().cpu().numpy()
