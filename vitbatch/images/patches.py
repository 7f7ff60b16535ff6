"""Pixels to patch rows."""

import numpy as np
from jaxtyping import UInt8


def patchify(image: UInt8[np.ndarray, "H W 3"], patch: int, merge: int) -> UInt8[np.ndarray, "N F"]:
    """[H, W, 3] -> rows in merge-block order (blocks row-major, row-major inside), features (channel, y, x)."""
    h, w, channels = image.shape
    side = patch * merge
    if h % side or w % side:
        raise ValueError(f"canvas {h}x{w} is not a multiple of {side} px")
    blocks = image.reshape(h // side, merge, patch, w // side, merge, patch, channels)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)


def padded(image: UInt8[np.ndarray, "h w 3"], canvas: tuple[int, int]) -> UInt8[np.ndarray, "H W 3"]:
    """`image` in the upper left corner of a canvas (height, width) of zeros."""
    h, w = image.shape[:2]
    if (h, w) == canvas:
        return image
    whole = np.zeros((*canvas, 3), np.uint8)
    whole[:h, :w] = image
    return whole
