"""What can be checked for AMD GPUs without one.

Needs the project's packages and the extra `isa`; `scripts/check_rocm` brings them, or run
`python -m scripts.lib.check_rocm` in an environment of your own.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from scripts.lib import rocm_rungs
from scripts.lib.amd_isa import KernelReport, compile_kernel, kernel_sources
from scripts.lib.gpu_aot import prepare_environment
from scripts.lib.rocm_claims import Result, markdown_table
from scripts.lib.rocm_kernels import ARCHS, KernelCase, kernel_cases, problems


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/check_rocm",
        description=(
            "--isa compiles every kernel, in every shape and tile in use, to AMD machine code and prints what the "
            "compiler says of it: matrix instructions, registers, spills, shared memory, occupancy. --lower lowers "
            "every program for ROCm, --gpu-aot compiles those for several devices with XLA's GPU pipeline. Nothing "
            "runs, and nothing is said about speed: no AMD GPU is involved. Exit status 1 if anything breaks a rule."
        ),
        epilog="example: scripts/check_rocm --isa --arch gfx950",
    )
    parser.add_argument("--isa", action="store_true", help="compile the kernels to machine code")
    parser.add_argument("--arch", action="append", choices=ARCHS, help=f"default: {', '.join(ARCHS)}")
    rocm_rungs.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the reports there")
    options = parser.parse_args(arguments)
    if not (options.isa or options.lower or options.gpu_aot or options.report):
        parser.error("nothing to check; say --isa, --lower or --gpu-aot")
    return options


def check(arch: str) -> list[tuple[KernelCase, KernelReport, list[str]]]:
    """Compiles all kernels for `arch`; each with what is wrong with it."""
    checked = []
    for case in kernel_cases(arch):
        for source in kernel_sources(case.fn, case.args, arch):
            report = compile_kernel(source, arch)
            checked.append((case, report, problems(case, report)))
    return checked


def table_of(arch: str, checked: list[tuple[KernelCase, KernelReport, list[str]]]) -> Table:
    table = Table(title=f"{arch}: compiled, not run")
    for column in ("case", "kernel", "matrix instructions", "VGPR", "spills", "LDS", "waves/SIMD", ""):
        table.add_column(column, justify="right" if column in ("VGPR", "spills", "LDS", "waves/SIMD") else "left")
    for case, report, wrong in checked:
        kinds = "\n".join(kind.removeprefix("v_mfma_") for kind in report.mfma)
        numbers = (str(n) for n in (report.vgprs, report.spills, report.lds, report.occupancy))
        table.add_row(case.name, report.name, kinds, *numbers, "; ".join(wrong) or "ok")
    return table


def isa_result(rows: list[dict[str, Any]], archs: Sequence[str]) -> Result:
    """What docs/rocm.md says of the kernels' machine code: a line for each kernel and architecture."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["name"], row["arch"]), []).append(row)

    def spread(found: list[dict[str, Any]], field: str) -> str:
        least, most = min(row[field] for row in found), max(row[field] for row in found)
        return str(least) if least == most else f"{least} to {most}"

    table = markdown_table(
        ["kernel", "architecture", "cases", "matrix instructions", "vector registers", "spills", "LDS", "waves a SIMD"],
        [
            [
                f"`{name}`",
                arch,
                str(len(found)),
                ", ".join(sorted({kind.removeprefix("v_mfma_") for row in found for kind in row["mfma"]})) or "-",
                *(spread(found, field) for field in ("vgprs", "spills", "lds", "occupancy")),
            ]
            for (name, arch), found in sorted(lines.items())
        ],
    )
    numbers = {
        "archs": " and ".join(archs),
        "kernels": len({row["name"] for row in rows}),
        "cases": len({row["case"] for row in rows}),
        "tables": {"What the compiler says of the kernels": table},
    }
    return Result("isa", not any(row["problems"] for row in rows), numbers)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.gpu_aot:
        prepare_environment()
    jax.config.update("jax_platforms", "cpu")
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    console, failed, rows = Console(width=160), 0, []
    with tempfile.TemporaryDirectory() as cache:
        # The compiler would otherwise leave its results in the home directory.
        os.environ["TRITON_CACHE_DIR"] = cache
        for arch in (options.arch or ARCHS) if options.isa else ():
            checked = check(arch)
            console.print(table_of(arch, checked))
            failed += sum(bool(wrong) for _, _, wrong in checked)
            rows += [{"case": case.name, **asdict(report), "problems": wrong} for case, report, wrong in checked]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.isa:
        console.print(f"{len(rows)} kernels, {failed} with problems")
    passed = rocm_rungs.run(options, console, isa_result(rows, options.arch or ARCHS) if options.isa else None)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
