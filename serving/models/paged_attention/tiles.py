"""Tile sizes of the paged attention kernels, one table by architecture.

Rows of ROCm architectures were chosen by what the compiler reports (no spills, shared memory within the chip's, at
least two waves a SIMD; `scripts/check_rocm --isa` prints it); nobody has timed them.
"""

from dataclasses import dataclass

from vitstripe.platform import Platform
from vitstripe.tiles import require_tile

_SMALLEST_SIDE = 16  # of a matrix instruction


@dataclass(frozen=True)
class DecodeTile:
    """keys: keys of a block that streams by. part: keys of a request that are summed by themselves before the parts are
    put together; a multiple of `keys`. warps: of 32 lanes on CUDA, 64 on ROCm. stages: depth of the software pipeline.

    Raises ValueError for sizes the kernel cannot run.
    """

    keys: int
    part: int
    warps: int
    stages: int

    def __post_init__(self):
        require_tile(self, keys=_SMALLEST_SIDE, part=_SMALLEST_SIDE)
        if self.part < self.keys:
            raise ValueError(f"DecodeTile.part is {self.part}, less than a block of {self.keys} keys")


@dataclass(frozen=True)
class ExtendTile:
    """queries, keys: rows and columns of the score tile a program holds at a time; the query heads of a key head lie
    side by side among the rows. warps, stages: as in DecodeTile.

    Raises ValueError for sizes the kernel cannot run.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self):
        require_tile(self, queries=_SMALLEST_SIDE, keys=_SMALLEST_SIDE)


_DECODE = {
    "gfx942": DecodeTile(keys=64, part=512, warps=4, stages=1),
    "gfx950": DecodeTile(keys=64, part=512, warps=4, stages=1),
    "sm90": DecodeTile(keys=64, part=512, warps=4, stages=3),
    "default": DecodeTile(keys=64, part=512, warps=4, stages=2),
}
_EXTEND = {
    "gfx942": ExtendTile(queries=128, keys=32, warps=8, stages=1),
    "gfx950": ExtendTile(queries=128, keys=64, warps=8, stages=1),
    "sm90": ExtendTile(queries=64, keys=64, warps=4, stages=3),
    "default": ExtendTile(queries=64, keys=64, warps=4, stages=2),
}


# Heads of 256: the sums of a tile take twice the registers, a block of keys twice the shared memory. Nobody has timed
# these rows, those of CUDA included.
_DECODE_WIDE = {
    "gfx942": DecodeTile(keys=32, part=512, warps=4, stages=1),
    "gfx950": DecodeTile(keys=32, part=512, warps=4, stages=1),
    "sm90": DecodeTile(keys=32, part=512, warps=4, stages=3),
    "default": DecodeTile(keys=32, part=512, warps=4, stages=2),
}
_EXTEND_WIDE = {
    "gfx942": ExtendTile(queries=64, keys=32, warps=8, stages=1),
    "gfx950": ExtendTile(queries=64, keys=32, warps=8, stages=1),
    "sm90": ExtendTile(queries=64, keys=32, warps=8, stages=2),
    "default": ExtendTile(queries=64, keys=32, warps=8, stages=1),
}
_WIDE = 128
"""Head dimensions above this take the tiles of wide heads."""


def decode_tile(platform: Platform, head_dim: int) -> DecodeTile:
    return platform.row_of(_DECODE_WIDE if head_dim > _WIDE else _DECODE)


def extend_tile(platform: Platform, head_dim: int) -> ExtendTile:
    return platform.row_of(_EXTEND_WIDE if head_dim > _WIDE else _EXTEND)
