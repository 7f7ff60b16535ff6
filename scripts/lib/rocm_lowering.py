"""Lowers every program for ROCm on a machine without one, and says what is wrong with what comes out.

JAX lowers for a named architecture on an abstract mesh: no device is involved and nothing is compiled, so this shows
that every operation has a ROCm lowering, which collectives and custom calls a program holds, for how many devices it is
partitioned and in which float8 format it multiplies. It shows nothing of XLA's own passes for AMD or of speed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from rich.table import Table

from dsa_indexer import KeyFormat
from scripts.lib.program_list import Listed, Scope, listed, reached_sites, unreached
from vitstripe import Program, collectives_in
from vitstripe.platform import Platform

ARCHS = ("gfx942", "gfx950")
MESHES = (1, 2, 8)

SHARDING_CALLS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
"""Names that mark the edges of a shard_map; the partitioner removes them."""

KERNEL_CALLS = {"__gpu$xla.gpu.triton"}
"""A Pallas kernel through Triton, which XLA compiles for AMD as well."""

EXPECTED_KERNELS: dict[str, tuple[str, ...]] = {
    "vision": ("packed_attention",),
    "indexer/replicated": ("index_scores", "select_filter"),
    "indexer/striped": ("index_scores", "select_filter"),
    "indexer/paged": ("index_scores", "select_filter"),
    "indexer/sparse_mla": ("sparse_mla",),
}
"""Kernels that a kind of program must hold at the sizes of the list: without them it fell back to plain XLA."""

_FLOAT8 = {"float8_e4m3fn": "f8E4M3FN", "float8_e4m3fnuz": "f8E4M3FNUZ"}

Advance = Callable[[int, int, str], None]
"""Called with (programs lowered, programs in all, what is next)."""


def rocm_mesh(tp: int, arch: str) -> AbstractMesh:
    """A mesh of `tp` devices of a ROCm architecture that need not be there."""
    shape = ((tp,), ("tp",), (AxisType.Auto,))
    if not hasattr(jax.sharding, "AbstractDevice"):  # jax 0.10 takes any kernel without being told the device
        return AbstractMesh(*shape)
    device = jax.sharding.AbstractDevice(device_kind=arch, num_cores=None, platform="rocm")
    return AbstractMesh(*shape, abstract_device=device)


def custom_calls_in(text: str) -> set[str]:
    """Targets of a lowered program's custom calls, without those that mark the edges of a shard_map."""
    found = set(re.findall(r"custom_call @([\w.$]+)", text)) | set(re.findall(r'call_target_name = "([^"]+)"', text))
    return found - SHARDING_CALLS


def kernels_in(text: str) -> set[str]:
    """Names of the Pallas kernels that a lowered program calls."""
    calls = [line for line in text.splitlines() if any(f"@{call}(" in line for call in KERNEL_CALLS)]
    return {name for line in calls for name in re.findall(r'\bname = "(\w+)"', line)}


def _on(mesh: AbstractMesh) -> AbstractContextManager[Any]:
    # A kernel outside any shard_map asks the mesh in force for its device.
    return jax.sharding.use_abstract_mesh(mesh) if hasattr(jax.sharding, "AbstractDevice") else nullcontext()


def lower_for_rocm(program: Program, mesh: AbstractMesh) -> str:
    """The StableHLO text of a program whose arguments are placed on `mesh`."""
    with _on(mesh):
        traced = program.fn.trace(*program.args)  # pyright: ignore[reportFunctionMemberAccess]
        return traced.lower(lowering_platforms=("rocm",)).as_text()


@dataclass(frozen=True)
class Lowered:
    """What a lowered program holds. kernels: names of its Pallas kernels. problems: what is wrong, in words."""

    collectives: dict[str, int]
    kernels: tuple[str, ...]
    float8: tuple[str, ...]
    problems: tuple[str, ...]


def examine(text: str, program: Program, kind: str, tp: int, arch: str) -> Lowered:
    """Reads a lowered program's text and compares it with what the program declares. kind: see `Listed`."""
    problems = []
    found = collectives_in(text)
    declared = {name: count for name, count in program.collectives.items() if count}
    if found != declared:
        problems.append(f"collectives are {found}, declared {declared}")
    partitions = re.search(r"mhlo\.num_partitions = (\d+)", text)
    if partitions is None or int(partitions[1]) != tp:
        problems.append(f"partitioned for {partitions[1] if partitions else 'no'} devices, not {tp}")
    if unknown := sorted(custom_calls_in(text) - KERNEL_CALLS):
        problems.append(f"custom calls that ROCm may lack: {', '.join(unknown)}")
    if "callback" in text:
        problems.append("calls back to the host")
    if "stablehlo.convolution" in text:
        problems.append("holds a convolution")
    float8 = tuple(sorted(set(re.findall(r"f8E\w+", text))))
    allowed = _FLOAT8[str(KeyFormat.fp8(arch).dtype)]
    if wrong := [kind for kind in float8 if kind != allowed]:
        problems.append(f"float8 of kind {', '.join(wrong)}; {arch} multiplies {allowed}")
    kernels = kernels_in(text)
    if absent := [name for name in EXPECTED_KERNELS.get(kind, ()) if name not in kernels]:
        problems.append(f"runs as plain XLA, without {' and '.join(absent)}")
    return Lowered(found, tuple(sorted(kernels)), float8, tuple(problems))


@dataclass
class Line:
    """One kind of program of one model: a line of the report."""

    package: str
    group: str
    kind: str
    lowerings: int = 0
    collectives: list[str] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @property
    def collectives_text(self) -> str:
        """On the largest mesh; several where programs of the kind differ, by their merge for instance."""
        return " or ".join(dict.fromkeys(self.collectives)) or "none"

    @property
    def kernels_text(self) -> str:
        return ", ".join(sorted(self.kernels)) or "-"


@dataclass
class Report:
    """lines: by package, model and kind. missing: what the list of programs lacks. float8: the formats met, by
    architecture. programs: every kind's name, for a check that a report is not older than the list."""

    lines: list[Line]
    missing: list[str]
    float8: dict[str, list[str]]

    @property
    def programs(self) -> list[str]:
        return sorted(f"{line.group}: {line.kind}" for line in self.lines)

    @property
    def lowerings(self) -> int:
        return sum(line.lowerings for line in self.lines)

    @property
    def failed(self) -> int:
        return sum(bool(line.problems) for line in self.lines) + len(self.missing)


def _cases(
    archs: Sequence[str], meshes: Sequence[int], scope: Scope | None, missing: set[str]
) -> Iterator[tuple[str, AbstractMesh, Listed]]:
    for arch in archs:
        for tp in meshes:
            mesh = rocm_mesh(tp, arch)
            found, lacking = listed(mesh, Platform("rocm", arch, arch), scope)
            missing.update(lacking)
            yield from ((arch, mesh, one) for one in found)


def check_lowering(
    archs: Sequence[str] = ARCHS,
    meshes: Sequence[int] = MESHES,
    scope: Scope | None = None,
    advance: Advance = lambda done, total, what: None,
) -> Report:
    """Lowers every program for every architecture and mesh. A program that raises is a problem of its line."""
    missing: set[str] = set()
    with reached_sites() as reached:
        cases = list(_cases(archs, meshes, scope, missing))
    lines: dict[tuple[str, str, str], Line] = {}
    float8: dict[str, set[str]] = {arch: set() for arch in archs}
    for done, (arch, mesh, one) in enumerate(cases):
        tp = mesh.shape["tp"]
        advance(done, len(cases), f"{one.group}, {one.program.name}, {tp} x {arch}")
        line = lines.setdefault(key := (one.package, one.group, one.kind), Line(*key))
        line.lowerings += 1
        where = f"{one.program.name} on {tp} x {arch}"
        try:
            lowered = examine(lower_for_rocm(one.program, mesh), one.program, one.kind, tp, arch)
        except Exception as error:  # one program that cannot be lowered must not hide the others
            line.problems.append(f"{where}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        line.kernels.update(lowered.kernels)
        float8[arch].update(lowered.float8)
        line.problems += [f"{where}: {problem}" for problem in lowered.problems]
        if tp == max(meshes):
            line.collectives.append(words(lowered.collectives))
    formats = {arch: sorted(found) for arch, found in float8.items()}
    return Report(list(lines.values()), sorted(missing) + unreached(reached), formats)


def words(collectives: Mapping[str, int]) -> str:
    """ "1 all_gather, 6 all_reduce", "none"."""
    return ", ".join(f"{count} {name}" for name, count in sorted(collectives.items())) or "none"


def table_of(report: Report, meshes: Sequence[int]) -> Table:
    table = Table(title="lowered for ROCm, not compiled", title_justify="left")
    for column in ("model", "program", "lowered", f"collectives on {max(meshes)}", "kernels", ""):
        table.add_column(column, justify="right" if column == "lowered" else "left", overflow="fold")
    for line in report.lines:
        wrong = f"{len(line.problems)} problems" if line.problems else "ok"
        table.add_row(line.group, line.kind, str(line.lowerings), line.collectives_text, line.kernels_text, wrong)
    return table
