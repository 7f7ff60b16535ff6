"""Tile sizes of the attention kernel, one table by architecture and head dimension."""

from dataclasses import dataclass

from vitbatch.config import ATTENTION_BLOCK
from vitstripe.platform import Platform


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
        for name, least in (("queries", ATTENTION_BLOCK), ("keys", 16)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise ValueError(f"AttentionTile.{name} is {size}; it must be a power of two of at least {least}")
        if self.warps not in (1, 2, 4, 8, 16) or self.stages < 1:
            raise ValueError(f"AttentionTile has {self.warps} warps and {self.stages} stages")


# The largest head dimension a row serves -> tile. Rows of ROCm architectures were chosen by what the compiler reports
# (no spills, shared memory within the chip's, at least two waves a SIMD); nobody has timed them.
_TILES: dict[str, dict[int, AttentionTile]] = {
    "gfx942": {80: AttentionTile(128, 64, 4, 1), 128: AttentionTile(128, 64, 8, 1)},
    "gfx950": {80: AttentionTile(128, 64, 4, 1), 128: AttentionTile(128, 64, 8, 1)},
    "sm90": {64: AttentionTile(128, 64, 8, 3), 80: AttentionTile(128, 64, 4, 3), 128: AttentionTile(128, 64, 8, 3)},
    "default": {128: AttentionTile(64, 64, 4, 2)},
}

# Windows hold few keys: small tiles waste the fewest, and masks take registers.
_WINDOW_TILES: dict[str, AttentionTile] = {
    "gfx942": AttentionTile(64, 64, 4, 1),
    "gfx950": AttentionTile(64, 64, 4, 1),
    "sm90": AttentionTile(64, 64, 4, 3),
    "default": AttentionTile(64, 64, 4, 2),
}


def tile_key(platform: Platform) -> str:
    """The row of the table for a platform: its ROCm architecture if listed, "sm90" on CUDA, else "default"."""
    if platform.kind == "cuda":
        return "sm90"
    return platform.arch if platform.arch in _TILES else "default"


def window_tile(platform: Platform) -> AttentionTile:
    return _WINDOW_TILES[tile_key(platform)]


def attention_tile(platform: Platform, head_dim: int) -> AttentionTile:
    """Raises ValueError when head_dim is larger than any row of the table serves."""
    rows = _TILES[tile_key(platform)]
    for most, tile in rows.items():
        if head_dim <= most:
            return tile
    raise ValueError(f"head dimension {head_dim} is over {max(rows)}, the largest the attention kernel serves")
