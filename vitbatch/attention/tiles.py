"""Tile sizes of the attention kernel, one table by architecture and head dimension."""

from dataclasses import dataclass

from vitbatch.config import ATTENTION_BLOCK
from vitstripe.platform import Platform
from vitstripe.tiles import require_tile


@dataclass(frozen=True)
class AttentionTile:
    """queries, keys: rows and columns of the score tile a program holds at a time; powers of two, queries at least 64.
    warps: of 32 lanes on CUDA, 64 on ROCm. stages: depth of the software pipeline over key blocks.

    Raises ValueError for sizes the kernel cannot run.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self):
        require_tile(self, queries=ATTENTION_BLOCK, keys=16)


# The largest head dimension a row serves -> tile. Rows of ROCm architectures were chosen by what the compiler reports
# (no spills, shared memory within the chip's, at least two waves a SIMD); nobody has timed them.
_TILES: dict[str, dict[int, AttentionTile]] = {
    "gfx942": {80: AttentionTile(128, 64, 4, 1), 128: AttentionTile(128, 64, 8, 1)},
    "gfx950": {80: AttentionTile(128, 64, 4, 1), 128: AttentionTile(128, 64, 8, 1)},
    "sm90": {64: AttentionTile(128, 64, 8, 3), 80: AttentionTile(128, 64, 4, 3), 128: AttentionTile(128, 64, 8, 3)},
    "default": {128: AttentionTile(64, 64, 4, 2)},
}

# Multiprocessors (compute units on ROCm). Where a launch has no more programs, half as many rows in each keep more of
# them busy.
_PROCESSORS = {"gfx942": 304, "gfx950": 256, "sm90": 132, "default": 0}

# Windows hold few keys: small tiles waste the fewest, and masks take registers.
_WINDOW_TILES: dict[str, AttentionTile] = {
    "gfx942": AttentionTile(64, 64, 4, 1),
    "gfx950": AttentionTile(64, 64, 4, 1),
    "sm90": AttentionTile(64, 64, 4, 3),
    "default": AttentionTile(64, 64, 4, 2),
}


def window_tile(platform: Platform) -> AttentionTile:
    return platform.row_of(_WINDOW_TILES)


def attention_tile(platform: Platform, head_dim: int, rows: int | None = None) -> AttentionTile:
    """rows: of all heads together; None for many. Raises ValueError when head_dim is larger than any row of the table
    serves."""
    by_head_dim = platform.row_of(_TILES)
    tile = next((tile for most, tile in by_head_dim.items() if head_dim <= most), None)
    if tile is None:
        most = max(by_head_dim)
        raise ValueError(f"head dimension {head_dim} is over {most}, the largest the attention kernel serves")
    few = rows is not None and rows <= tile.queries * platform.row_of(_PROCESSORS)
    return window_tile(platform) if few else tile
