"""Synthetic pictures: the ones the preprocessing goldens were made from, and random ones."""

import io

import numpy as np
from PIL import Image


def synth(w: int, h: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [h, w, channels]: three quarters a smooth ramp, one quarter hashed texture. Exact integers."""
    y, x = np.arange(h, dtype=np.uint64)[:, None], np.arange(w, dtype=np.uint64)[None, :]
    ramps = [
        x * np.uint64(255) // np.uint64(max(w - 1, 1)) + 0 * y,
        y * np.uint64(255) // np.uint64(max(h - 1, 1)) + 0 * x,
    ]
    ramps += [(x + y) % np.uint64(256)] * (channels - 2)
    mask = np.uint64(0xFFFFFFFF)
    planes = []
    for c in range(channels):
        salt = np.uint64((c + 1) * 83492791 + seed * 2654435761)
        texture = ((x * np.uint64(73856093)) ^ (y * np.uint64(19349663)) ^ salt) & mask
        texture = (texture * np.uint64(2654435761)) & mask
        planes.append((ramps[c] * np.uint64(3) + (texture >> np.uint64(24))) // np.uint64(4))
    return np.stack(planes, -1).astype(np.uint8)


def noise(h: int, w: int, seed: int) -> np.ndarray:
    """A random RGB picture."""
    return np.random.default_rng([h, w, seed]).integers(0, 256, (h, w, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    """The bytes of a file of the given format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
