"""Tile sizes of the indexer's kernels, one table by architecture.

Rows of ROCm architectures were chosen by what the compiler reports (no spills, shared memory within the chip's, at
least two waves a SIMD; `scripts/check_rocm --isa` prints it); nobody has timed them.
"""

from dataclasses import dataclass

from vitstripe.platform import Platform

_WARPS = (1, 2, 4, 8, 16, 32)


def _require_powers_of_two(owner: object, *names: str) -> None:
    for name in names:
        size = getattr(owner, name)
        if size < 1 or size & (size - 1):
            raise ValueError(f"{type(owner).__name__}.{name} is {size}; it must be a power of two")


def _require_warps(owner: object, *names: str) -> None:
    for name in names:
        if getattr(owner, name) not in _WARPS:
            raise ValueError(f"{type(owner).__name__}.{name} is {getattr(owner, name)}; it must be one of {_WARPS}")


@dataclass(frozen=True)
class ScoreTile:
    """The scores a program of the logits kernel computes at a time.

    columns: query rows times heads, which stay; a multiple of the number of heads. keys: keys of a block that streams
    by. run: key blocks a program walks over, fewer where there are few rows. warps: of 32 lanes on CUDA, 64 on ROCm.
    stages: depth of the software pipeline. ahead: multiply the next block while this one is summed, which takes twice
    the registers. contracted: on Hopper (sm90) alone, a gate is multiplied and added in one instruction.
    Raises ValueError for sizes the kernel cannot run.
    """

    columns: int
    keys: int
    run: int
    warps: int
    stages: int
    ahead: bool = False
    contracted: bool = False

    def __post_init__(self):
        _require_powers_of_two(self, "columns", "keys")
        _require_warps(self, "warps")
        if self.contracted and self.keys != 64:
            raise ValueError(f"ScoreTile.contracted is for blocks of 64 keys, not {self.keys}")
        if self.stages < 1 or self.run < 1:
            raise ValueError(f"ScoreTile has {self.stages} stages and runs of {self.run} blocks; both start at 1")


@dataclass(frozen=True)
class SelectTile:
    """How the programs of the selection kernels read their rows.

    sample: scores read to guess a threshold. read: scores of one step of the pass over a row, at most 32768;
    repair_read: the same for rows that need another pass. guess_warps, warps, repair_warps, pick_warps: of the guess,
    the pass, the other passes and the final choice, of 32 lanes on CUDA, 64 on ROCm. repair_rows: rows a program looks
    through for those that need another pass. Raises ValueError for sizes the kernels cannot run.
    """

    sample: int
    read: int
    guess_warps: int
    warps: int
    pick_warps: int
    repair_warps: int = 16
    repair_rows: int = 8
    repair_read: int = 512

    def __post_init__(self):
        _require_powers_of_two(self, "sample", "read", "repair_read")
        _require_warps(self, "guess_warps", "warps", "pick_warps", "repair_warps")
        if max(self.read, self.repair_read) > 1 << 15:
            raise ValueError(
                f"SelectTile reads {self.read} or {self.repair_read} scores a step; ranks within a step have 16 bits, "
                f"so {1 << 15} at most"
            )
        if self.repair_rows < 1:
            raise ValueError(f"SelectTile.repair_rows is {self.repair_rows}; it must be at least 1")


@dataclass(frozen=True)
class SparseTile:
    """What a program of the sparse attention kernel holds.

    heads: query heads of one row. keys: selected keys of a block. warps: of 32 lanes on CUDA, 64 on ROCm. stages: depth
    of the software pipeline. columns: values summed by one product. keys_first: keys are the first operand of the
    scores and heads the second. apart: the scores are computed in a branch, so that they and the values' product are no
    chain to the compiler, all of whose scores each of two groups of four warps would compute. programs: a launch of
    fewer rows than this cuts each row's selection into parts, of least_blocks blocks or more.
    Raises ValueError for sizes the kernel cannot run.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    columns: int = 512
    keys_first: bool = False
    apart: bool = False
    programs: int = 128
    least_blocks: int = 4

    def __post_init__(self):
        _require_powers_of_two(self, "heads", "keys", "columns")
        _require_warps(self, "warps")
        for name in ("heads", "keys", "columns"):
            if getattr(self, name) < 16:
                raise ValueError(f"SparseTile.{name} is {getattr(self, name)}; matrix instructions take 16 at least")
        for name in ("stages", "programs", "least_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"SparseTile.{name} is {getattr(self, name)}; it must be at least 1")


_SCORES = {
    "gfx942": ScoreTile(columns=128, keys=64, run=64, warps=4, stages=1),
    "gfx950": ScoreTile(columns=128, keys=64, run=64, warps=4, stages=1),
    "sm90": ScoreTile(columns=128, keys=64, run=128, warps=4, stages=2, ahead=True, contracted=True),
    "default": ScoreTile(columns=128, keys=64, run=64, warps=4, stages=2),
}
_FLOAT8_SCORES = {
    # Keys pass through registers on their way to float16 and leave shared memory to twice as many query rows.
    "sm90": ScoreTile(columns=256, keys=64, run=128, warps=4, stages=3),
}
_SELECT = {
    "gfx942": SelectTile(sample=8192, read=1024, guess_warps=8, warps=4, pick_warps=8),
    "gfx950": SelectTile(sample=8192, read=1024, guess_warps=8, warps=4, pick_warps=8),
    "sm90": SelectTile(sample=8192, read=2048, guess_warps=8, warps=4, pick_warps=4),
    "default": SelectTile(sample=8192, read=2048, guess_warps=8, warps=4, pick_warps=8),
}

_SPARSE = {
    # The queries stay in registers there, and those of 16 heads leave room for the rest.
    "gfx942": SparseTile(heads=16, keys=32, warps=4, stages=1, columns=128, keys_first=True),
    "gfx950": SparseTile(heads=16, keys=32, warps=4, stages=1, columns=128, keys_first=True),
    "sm90": SparseTile(heads=64, keys=64, warps=8, stages=2, keys_first=True, apart=True, least_blocks=2),
    "default": SparseTile(heads=16, keys=32, warps=4, stages=1, columns=128, keys_first=True),
}
# Latents wait in shared memory narrow and wide; larger blocks spill. Not timed, by the compiler's report.
_FLOAT8_SPARSE = {
    "sm90": SparseTile(heads=64, keys=32, warps=8, stages=3, columns=256, apart=True, least_blocks=2),
}
_SPARSE_OF_FEW_HEADS = {"sm90": SparseTile(heads=16, keys=64, warps=4, stages=2, programs=256)}
_FLOAT8_SPARSE_OF_FEW_HEADS = {
    "sm90": SparseTile(heads=16, keys=32, warps=4, stages=2, columns=128, programs=256),
}
_FEW_HEADS = 32


def has_tiles(platform: Platform) -> bool:
    """Whether the tables name this architecture, instead of giving it what suits any."""
    return platform.tile_arch in _SCORES


def score_tile(platform: Platform, *, is_float8: bool) -> ScoreTile:
    """The tile of the logits kernel for keys of one byte (is_float8) or two."""
    return platform.row_of(_SCORES | _FLOAT8_SCORES if is_float8 else _SCORES)


def select_tile(platform: Platform) -> SelectTile:
    """The tile of the selection kernels."""
    return platform.row_of(_SELECT)


def sparse_tile(platform: Platform, *, heads: int, is_float8: bool) -> SparseTile:
    """The tile of the sparse attention kernel for that many heads on a device, with latents of one byte a number
    (is_float8) or two."""
    table = _SPARSE | (_FLOAT8_SPARSE if is_float8 else {})
    if heads <= _FEW_HEADS:
        table |= _SPARSE_OF_FEW_HEADS | (_FLOAT8_SPARSE_OF_FEW_HEADS if is_float8 else {})
    return platform.row_of(table)
