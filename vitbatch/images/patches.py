"""Pixels to patch rows, some lines at a time: what is copied more than once stays in a core's cache."""

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import UInt8
from PIL import Image

_BAND_PIXELS = 1 << 16


def patchify(image: UInt8[np.ndarray, "H W 3"], patch: int, merge: int) -> UInt8[np.ndarray, "N F"]:
    """[H, W, 3] -> rows in merge-block order (blocks row-major, row-major inside), features (channel, y, x)."""
    h, w, channels = image.shape
    side = patch * merge
    if h % side or w % side:
        raise ValueError(f"canvas {h}x{w} is not a multiple of {side} px")
    blocks = image.reshape(h // side, merge, patch, w // side, merge, patch, channels)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)


def bands(image: Image.Image | UInt8[np.ndarray, "H W 3"], side: int) -> Iterator[UInt8[np.ndarray, "_ W 3"]]:
    """The lines of an RGB image from top to bottom, a multiple of `side` at a time except for the last.

    image: also a grey one, three times as wide, that holds the bytes of all three channels. Pillow keeps four bytes a
    pixel of RGB, and lets no other thread run while it packs them to three: in short pieces here.
    """
    height, width = image.shape[:2] if isinstance(image, np.ndarray) else image.size[::-1]
    lines = side * max(1, _BAND_PIXELS // (side * width))
    for top in range(0, height, lines):
        stop = min(height, top + lines)
        if isinstance(image, np.ndarray):
            yield image[top:stop]
        else:
            packed = image.crop((0, top, width, stop)).tobytes()
            yield np.frombuffer(packed, np.uint8).reshape(stop - top, -1, 3)


def patch_rows(
    content: Iterable[UInt8[np.ndarray, "_ w 3"]], canvas: tuple[int, int], patch: int, merge: int
) -> UInt8[np.ndarray, "N F"]:
    """As `patchify` of the content in the upper left corner of a canvas (height, width) of zeros.

    content: bands of patch * merge lines or a multiple, the last of them of any height.
    """
    side = patch * merge
    rows = np.zeros((canvas[0] * canvas[1] // patch**2, 3 * patch**2), np.uint8)
    begin = 0
    for band in content:
        cut = patchify(padded(band, (-(-len(band) // side) * side, canvas[1])), patch, merge)
        rows[begin : begin + len(cut)] = cut
        begin += len(cut)
    return rows


def padded(image: UInt8[np.ndarray, "h w 3"], canvas: tuple[int, int]) -> UInt8[np.ndarray, "H W 3"]:
    """`image` in the upper left corner of a canvas (height, width) of zeros."""
    h, w = image.shape[:2]
    if (h, w) == canvas:
        return image
    whole = np.zeros((*canvas, 3), np.uint8)
    whole[:h, :w] = image
    return whole
