"""Warm-up: every bucket compiled ahead of time and run on every device, before the first request."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketReport:
    """name: of the program. lanes, capacity: its shape. compile_seconds: 0 when it was compiled before."""

    name: str
    lanes: int
    capacity: int
    compile_seconds: float
    run_seconds: float


@dataclass(frozen=True)
class WarmupReport:
    """One row a bucket; `str(report)` is an aligned table."""

    buckets: tuple[BucketReport, ...]

    @property
    def seconds(self) -> float:
        return sum(b.compile_seconds + b.run_seconds for b in self.buckets)

    def __str__(self) -> str:
        rows = [("program", "lanes", "patches", "compile s", "run s")]
        rows += [
            (b.name, str(b.lanes), str(b.lanes * b.capacity), f"{b.compile_seconds:.2f}", f"{b.run_seconds:.3f}")
            for b in self.buckets
        ]
        return "\n".join(_align(row, [max(map(len, column)) for column in zip(*rows, strict=True)]) for row in rows)


def _align(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = row
    return "  ".join([name.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))])
