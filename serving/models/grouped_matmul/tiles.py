"""Tile sizes of the grouped product, by architecture and by how many rows an expert has.

Rows of ROCm architectures were chosen by what the compiler reports (`scripts/check_rocm --isa` prints it); nobody has
timed them.
"""

from dataclasses import dataclass

from vitstripe.platform import Platform
from vitstripe.tiles import require_tile

SMALLEST_SIDE = 16  # of a matrix instruction


@dataclass(frozen=True)
class GroupTile:
    """rows, columns: of the result that a program makes. depth: columns of x that stream by at a time. warps: of 32
    lanes on CUDA, 64 on ROCm. stages: depth of the software pipeline.

    Raises ValueError for sizes the kernel cannot run.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __post_init__(self):
        require_tile(self, rows=SMALLEST_SIDE, columns=SMALLEST_SIDE, depth=SMALLEST_SIDE)


# Few rows an expert, as in a decode: what takes time is to read the weights once.
_LOW = {
    "gfx942": GroupTile(rows=16, columns=64, depth=128, warps=4, stages=1),
    "gfx950": GroupTile(rows=16, columns=64, depth=128, warps=4, stages=1),
    "sm90": GroupTile(rows=16, columns=64, depth=128, warps=4, stages=4),
    "default": GroupTile(rows=16, columns=64, depth=128, warps=4, stages=2),
}
_MIDDLE = {
    "gfx942": GroupTile(rows=64, columns=128, depth=64, warps=4, stages=1),
    "gfx950": GroupTile(rows=64, columns=128, depth=64, warps=4, stages=1),
    "sm90": GroupTile(rows=64, columns=128, depth=64, warps=4, stages=4),
    "default": GroupTile(rows=64, columns=128, depth=32, warps=4, stages=3),
}
_HIGH = {
    "gfx942": GroupTile(rows=128, columns=128, depth=64, warps=8, stages=1),
    "gfx950": GroupTile(rows=128, columns=128, depth=64, warps=8, stages=1),
    "sm90": GroupTile(rows=128, columns=128, depth=64, warps=8, stages=3),
    "default": GroupTile(rows=128, columns=128, depth=32, warps=8, stages=3),
}


def group_tile(platform: Platform, rows: int, experts: int) -> GroupTile:
    """For `rows` rows over `experts` experts: the tile that a typical expert fills."""
    each = rows / max(experts, 1)
    return platform.row_of(_LOW if each <= 24 else _MIDDLE if each <= 128 else _HIGH)
