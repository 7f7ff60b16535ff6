"""What preparation gives: patch rows with their grid and key, or one error."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8


class ImageError(ValueError):
    """An image that cannot be used. The text is safe to show to whoever sent it."""


@dataclass(frozen=True)
class PreparedImage:
    """An image ready for the encoder.

    patches: one frame, patches in merge-block order, features ordered (channel, y, x), not normalised.
    grid_thw: (1, rows, columns) of patches. key: 32-byte digest of the content and of the settings it was prepared
    with; equal keys mean equal patches. num_tokens: rows of its embedding. size: (height, width) as given, upright.
    """

    patches: UInt8[np.ndarray, "N F"]
    grid_thw: tuple[int, int, int]
    key: bytes
    num_tokens: int
    size: tuple[int, int]

    def __post_init__(self):
        frames, gh, gw = self.grid_thw
        if frames != 1 or self.patches.shape[0] != gh * gw:
            raise ValueError(f"{self.patches.shape[0]} patches do not fill the grid {self.grid_thw}")
        if len(self.key) < 16:
            raise ValueError(f"an image key of {len(self.key)} bytes is too short; use at least 16")
