"""Rotary positions of a prompt with images (M-RoPE), on the host."""

from collections.abc import Sequence

import numpy as np


def mrope_positions(
    length: int, spans: Sequence[tuple[int, tuple[int, int, int]]], merge: int
) -> tuple[np.ndarray, int]:
    """Positions int32 [3, length] on the axes (t, h, w), and the offset `delta` of what is generated after the prompt:
    the token at index i >= length has position i + delta on every axis.

    spans: (start, grid_thw in patches) of each image's placeholder run, in order. A text run counts up on all axes; an
    image at cursor c has t = c + frame, h = c + row, w = c + column over its merged grid, and moves the cursor by the
    longer side of it (the rule of Qwen2-VL and its successors).
    """
    positions = np.empty((3, length), np.int32)
    cursor = at = 0
    for start, (t, h, w) in spans:
        h, w = h // merge, w // merge
        positions[:, at:start] = cursor + np.arange(start - at)
        cursor += start - at
        end = start + t * h * w
        grid = np.stack(np.meshgrid(np.arange(t), np.arange(h), np.arange(w), indexing="ij")).reshape(3, -1)
        positions[:, start:end] = cursor + grid
        cursor += max(h, w)
        at = end
    positions[:, at:] = cursor + np.arange(length - at)
    return positions, int(positions.max(initial=-1)) + 1 - length
