"""A picture's pixels to patch rows, band by band. No band needs another: each may be any thread's work.

lines, where the height stays      columns, where it does not: Pillow changes the height of each column of pixels
+-----------+                      by itself, so bands of them come out to the bit like the whole picture
| band 0    |   +---+---+---+
+-----------+   | 0 | 1 | 2 |      Where the width changes, the picture is resized whole: which of the two Pillow
| band 1    |   |   |   |   |      changes first depends on the sizes and on its version.
+-----------+   +---+---+---+
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitbatch.images.rules import Fit

# So many that Python's part in a band is small, so few that the band stays in a core's cache.
_BAND_PIXELS = 1 << 19

T = TypeVar("T")
Picture = Image.Image | UInt8[np.ndarray, "H W 3"]


@runtime_checkable
class Spread(Protocol):
    """Calls `work` with every item, in any order and on any threads; what it returned, in the items' order.
    `Workers.spread` is one."""

    def __call__(self, work: Callable[[slice], T], items: Sequence[slice]) -> list[T]: ...


def one_by_one(work: Callable[[slice], T], items: Sequence[slice]) -> list[T]:
    return [work(item) for item in items]


def patchify(image: UInt8[np.ndarray, "H W 3"], patch: int, merge: int) -> UInt8[np.ndarray, "N F"]:
    """[H, W, 3] -> rows in merge-block order (blocks row-major, row-major inside), features (channel, y, x)."""
    h, w, channels = image.shape
    side = patch * merge
    if h % side or w % side:
        raise ValueError(f"canvas {h}x{w} is not a multiple of {side} px")
    blocks = image.reshape(h // side, merge, patch, w // side, merge, patch, channels)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)


def resized_patches(
    picture: Picture, fit: Fit, patch: int, merge: int, spread: Spread = one_by_one
) -> tuple[UInt8[np.ndarray, "N F"], bytes]:
    """What `patchify` makes of `picture` resized (bicubic) to `fit.content`, in the upper left corner of a canvas of
    zeros; and a digest of the pixels given, which for pictures of one size and fit tells them apart.

    picture: RGB, arrays line after line in memory. It must not change meanwhile.
    """
    side, (h, w), canvas = patch * merge, fit.content, fit.canvas
    height, width = _size(picture)
    # Zeros are written by the thread that asks for them, while all others wait for the interpreter.
    make = np.empty if fit.content == canvas else np.zeros
    rows = make((canvas[0] * canvas[1] // patch**2, 3 * patch**2), np.uint8)
    blocks = rows.reshape(canvas[0] // side, canvas[1] // side, merge, merge, 3, patch, patch)

    def cut(band: UInt8[np.ndarray, "_ _ 3"], top: int, left: int) -> None:
        down, across = (-(-length // side) for length in band.shape[:2])
        cells = padded(band, (down * side, across * side)).reshape(down, merge, patch, across, merge, patch, 3)
        top, left = top // side, left // side
        blocks[top : top + down, left : left + across] = cells.transpose(0, 3, 1, 4, 6, 2, 5)

    def cut_lines(lines: slice) -> bytes:
        band = _pixels(picture, lines, slice(0, w))
        cut(band, lines.start, 0)
        return hashlib.sha256(band.data).digest()

    def cut_columns(columns: slice) -> bytes:
        band = _pixels(picture, slice(0, height), columns)
        cut(_heightened(band, h), 0, columns.start)
        return hashlib.sha256(band.data).digest()

    def digest(lines: slice) -> bytes:
        return hashlib.sha256(_pixels(picture, lines, slice(0, width)).data).digest()

    def cut_resized(lines: slice) -> None:
        cut(_pixels(resized, lines, slice(0, w)), lines.start, 0)

    if (h, w) == (height, width):
        digests = spread(cut_lines, _bands(h, w, side))
    elif w == width:
        digests = spread(cut_columns, _bands(w, max(h, height), side))
    else:
        digests = spread(digest, _bands(height, width, side))
        resized = _resized(picture, h, w)
        spread(cut_resized, _bands(h, w, side))
    return rows, b"".join(digests)


def padded(image: UInt8[np.ndarray, "h w 3"], canvas: tuple[int, int]) -> UInt8[np.ndarray, "H W 3"]:
    """`image` in the upper left corner of a canvas (height, width) of zeros."""
    h, w = image.shape[:2]
    if (h, w) == canvas:
        return image
    whole = np.zeros((*canvas, 3), np.uint8)
    whole[:h, :w] = image
    return whole


def _bands(length: int, across: int, unit: int) -> list[slice]:
    """`length` lines of `across` pixels, or columns of them, in pieces of whole units but for the last."""
    step = unit * max(1, _BAND_PIXELS // (unit * across))
    return [slice(begin, min(length, begin + step)) for begin in range(0, length, step)]


def _size(picture: Picture) -> tuple[int, int]:
    return picture.shape[:2] if isinstance(picture, np.ndarray) else (picture.height, picture.width)


def _pixels(picture: Picture, lines: slice, columns: slice) -> UInt8[np.ndarray, "h w 3"]:
    """A part of a picture, its lines one after another."""
    if isinstance(picture, np.ndarray):
        return np.ascontiguousarray(picture[lines, columns])
    # Pillow keeps four bytes a pixel of RGB, and lets no other thread run while it packs them to three.
    part = picture.crop((columns.start, lines.start, columns.stop, lines.stop))
    return np.frombuffer(part.tobytes(), np.uint8).reshape(part.height, part.width, 3)


def _resized(picture: Picture, height: int, width: int) -> Image.Image:
    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _heightened(band: UInt8[np.ndarray, "H w 3"], h: int) -> UInt8[np.ndarray, "h w 3"]:
    """`band` with `h` lines. That is the same work for each byte of a line, so Pillow reads the bytes where they lie,
    four as if they were a pixel (which it has faster code for) or one; of RGB it would make a copy of four bytes a
    pixel."""
    height, width = band.shape[:2]
    mode, across = ("L", 3 * width) if width % 4 else ("RGBX", 3 * width // 4)
    image = Image.frombuffer(mode, (across, height), band, "raw", mode, 0, 1)
    made = image.resize((across, h), Image.Resampling.BICUBIC)
    return np.frombuffer(made.tobytes(), np.uint8).reshape(h, width, 3)
