"""The rungs of scripts/check_rocm that look at whole programs: --lower and --gpu-aot, and what they tell the docs."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.lib import gpu_aot, rocm_lowering
from scripts.lib.rocm_claims import Result, markdown_table, read_report, write_docs
from scripts.lib.rocm_lowering import ARCHS, MESHES, Advance, Report


def add_options(parser: argparse.ArgumentParser) -> None:
    rungs = parser.add_argument_group("whole programs")
    rungs.add_argument(
        "--lower", action="store_true", help="lower every program of the three packages for ROCm, as on 1, 2 and 8 GPUs"
    )
    rungs.add_argument(
        "--gpu-aot",
        action="store_true",
        help="compile the SPMD programs with XLA's GPU pipeline (CUDA's compiler; extra aot) for 8 devices",
    )
    rungs.add_argument("--mesh", type=int, action="append", choices=MESHES, help="for --lower; default: all of them")
    docs = parser.add_argument_group("docs/rocm.md")
    docs.add_argument("--write-docs", action="store_true", help="put what was found into docs/rocm.md")
    docs.add_argument(
        "--report", type=Path, metavar="FILE", help="what scripts/on_rocm wrote on an AMD machine, for --write-docs"
    )


@contextmanager
def _bar(title: str, console: Console) -> Iterator[Advance]:
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, what="")
        yield lambda done, total, what: progress.update(task, completed=done, total=total, what=what)


def _and(words: Sequence[object]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def lowering_result(report: Report, archs: Sequence[str], meshes: Sequence[int]) -> Result:
    lines = report.lines
    rows = [
        [line.group, f"`{line.kind}`", str(line.lowerings), line.collectives_text, line.kernels_text] for line in lines
    ]
    table = markdown_table(["model", "program", "lowered", f"collectives on {max(meshes)} devices", "kernels"], rows)
    float8 = sorted({f"{arch}: {kind}" for arch, kinds in report.float8.items() for kind in kinds})
    numbers = {
        "kinds": len({(line.package, line.kind) for line in lines}),
        "models": len({line.group.split(",")[0].split(" ")[-1] for line in lines if line.group != "engine"}),
        "lowerings": report.lowerings,
        "archs": _and(archs),
        "meshes": f"{_and(meshes)} devices",
        "float8": "; ".join(float8),
        "programs": report.programs,
        "tables": {"What was lowered": table},
    }
    return Result("lower", report.failed == 0, numbers)


def lower(options: argparse.Namespace, console: Console) -> Result:
    archs, meshes = options.arch or ARCHS, tuple(options.mesh or MESHES)
    with _bar("lowering", console) as advance:
        report = rocm_lowering.check_lowering(archs, meshes, advance=advance)
    console.print(rocm_lowering.table_of(report, meshes))
    for line in report.lines:
        for problem in line.problems:
            console.print(f"problem: {line.group}: {problem}", soft_wrap=True, highlight=False)
    for missing in report.missing:
        console.print(f"not covered: {missing}", soft_wrap=True, highlight=False)
    console.print(
        f"{report.lowerings} lowerings of {len(report.lines)} kinds of programs, {report.failed} with problems"
    )
    return lowering_result(report, archs, meshes)


def aot_result(compiled: list[gpu_aot.Compiled]) -> Result:
    rows = [
        [
            c.group,
            f"`{c.name}`",
            *(f"{n / 2**20:,.0f}" for n in (c.argument_bytes, c.temporary_bytes, c.output_bytes)),
            c.collectives_text,
            c.selection or "-",
        ]
        for c in compiled
    ]
    heads = ["model", "program", "arguments, MiB a device", "temporary", "outputs", "collectives", "selection"]
    largest = max(compiled, key=lambda c: c.temporary_bytes)
    selections = sorted({c.selection for c in compiled if c.group.startswith("indexer")} - {""})
    numbers = {
        "programs": len(compiled),
        "topology": "NVIDIA H200",
        "most": f"{largest.temporary_bytes / 2**20:,.0f} MiB ({largest.group}, `{largest.name}`)",
        "selection": _and(selections) if selections else "no sort and no kernel",
        "tables": {"What XLA's GPU pipeline made of the SPMD programs": markdown_table(heads, rows)},
    }
    return Result("aot", not any(c.problems for c in compiled), numbers)


def compile_ahead(options: argparse.Namespace, console: Console) -> Result | None:
    """None where the compiler is not there, which is said and is no failure."""
    try:
        mesh = gpu_aot.topology_mesh()
    except gpu_aot.Unavailable as reason:
        console.print(f"skipped --gpu-aot: {reason}", soft_wrap=True, highlight=False)
        return None
    with _bar("compiling", console) as advance:
        compiled = list(gpu_aot.check_aot(mesh, advance=advance))
    console.print(gpu_aot.table_of(compiled))
    for c in compiled:
        for problem in c.problems:
            console.print(f"problem: {c.group}, {c.name}: {problem}", soft_wrap=True, highlight=False)
    console.print(f"{len(compiled)} programs, {sum(bool(c.problems) for c in compiled)} with problems")
    return aot_result(compiled)


def run(options: argparse.Namespace, console: Console, isa: Result | None = None) -> bool:
    """The rungs that the options ask for, and the docs with `isa` beside them. True unless one failed."""
    results = [result for result in (isa,) if result is not None]
    if options.report is not None:
        try:
            results.append(read_report(options.report))
        except ValueError as error:
            console.print(f"error: {error}", soft_wrap=True, markup=False)
            return False
    if options.lower:
        results.append(lower(options, console))
    if options.gpu_aot and (result := compile_ahead(options, console)) is not None:
        results.append(result)
    if options.write_docs:
        write_docs({result.rung: result for result in results})
        console.print(f"docs/rocm.md: wrote {_and([result.rung for result in results] or ['nothing'])}")
    return all(result.passed for result in results)
