"""The host's part of window attention: which merged cells share a window, and the order that puts them side by side.

A window is `side` x `side` merged cells. Windows go row by row over an image's cells; those at the right and lower edge
hold what is left. An image of 3 x 5 cells with side 2, numbered in the order its cells stand in:

    as they come     0  1 | 2  3 | 4       windows row by row      0  1  5  6 | 2  3  7  8 | 4  9 |
                     5  6 | 7  8 | 9                               10 11      | 12 13      | 14
                     -----+------+---
                    10 11 |12 13 |14
"""

import numpy as np
from jaxtyping import Int

from vitbatch.lanes import Windows


def window_order(rows: int, columns: int, side: int) -> tuple[Int[np.ndarray, "G"], Int[np.ndarray, "G"]]:
    """The cell at each place when rows x columns cells stand window by window, and the place where each place's window
    begins (Qwen2.5-VL's window index)."""
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    across = -(-columns // side)
    window = row // side * across + column // side
    order = np.argsort(window, kind="stable").astype(np.int32)
    sizes = np.bincount(window)
    return order, np.repeat(np.cumsum(sizes) - sizes, sizes).astype(np.int32)


def no_windows(lanes: int, cells: int) -> Windows[np.ndarray]:
    """Lanes of padding: every cell where it is, in no window."""
    stay = np.tile(np.arange(cells, dtype=np.int32), (lanes, 1))
    return Windows(stay, stay.copy(), np.full((lanes, cells), -1, np.int32))


def add_windows(windows: Windows[np.ndarray], lane: int, start: int, rows: int, columns: int, side: int) -> None:
    """Writes an image of rows x columns cells, the first of which is cell `start` of the lane, into `windows`."""
    order, begin = window_order(rows, columns, side)
    own = slice(start, start + rows * columns)
    windows.order[lane, own] = start + order
    windows.window[lane, own] = start + begin
    windows.place[lane, start + order] = np.arange(own.start, own.stop)
