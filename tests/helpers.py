"""What several test files use and no fixture needs: the reference input generator and a relative error."""

from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parent / "goldens"
DATA = Path(__file__).parent / "data"


def det(shape: tuple[int, ...] | int, seed: int = 0) -> np.ndarray:
    """float32 values in [-1, 1) that are the same on every platform: the inputs the reference outputs were made from.

    Element i is the top 24 bits of a 32-bit integer hash of i + 1000003 * seed, so every value is exact in float32.
    """
    mask = np.uint64(0xFFFFFFFF)
    h = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64) + (np.uint64(seed * 1000003) & mask)
    for factor, shift in ((2654435761, 15), (2246822519, 13), (3266489917, 16)):
        h = (h * np.uint64(factor)) & mask
        h ^= h >> np.uint64(shift)
    unit = (h >> np.uint64(8)).astype(np.float64) / 2**23 - 1.0
    return unit.astype(np.float32).reshape(shape)


def relative_error(actual, expected) -> float:
    """The largest absolute difference over the largest absolute expected value, in float64."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
