"""What this project claims of ROCm, each claim with the rung of checks it stands on, as docs/rocm.md shows it.

A rung's last result is kept in docs/rocm_claims.json; the block of docs/rocm.md between the two marks is made of that
file alone. `scripts/check_rocm --write-docs` writes both, `scripts/on_rocm` makes the results of an AMD machine, and a
test makes the block anew.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import jax

_DOCS = Path(__file__).parents[2] / "docs"
RESULTS = _DOCS / "rocm_claims.json"
DOCUMENT = _DOCS / "rocm.md"
BEGIN = "<!-- written by scripts/check_rocm --write-docs; do not edit -->"
END = "<!-- end of what scripts/check_rocm --write-docs writes -->"

NOT_MEASURED = "**not measured**"


@dataclass(frozen=True)
class Result:
    """What a rung found. numbers: what its claims and its table quote."""

    rung: str
    passed: bool
    numbers: Mapping[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=lambda: date.today().isoformat())
    jax: str = jax.__version__


@dataclass(frozen=True)
class Claim:
    """rung: the check it stands on. text: with the numbers of that rung's result in braces. test: the entry of the
    number "tests" that decides it, where a rung does not pass or fail as a whole."""

    rung: str
    text: str
    test: str = ""

    def status(self, result: Result | None) -> str | None:
        """None where nothing was measured."""
        if result is None:
            return None
        if self.test:
            return {"passed": "holds", "failed": "**fails**"}.get(result.numbers.get("tests", {}).get(self.test, ""))
        return "holds" if result.passed else "**fails**"


RUNGS = {
    "lower": "`scripts/check_rocm --lower`",
    "isa": "`scripts/check_rocm --isa`",
    "aot": "`scripts/check_rocm --gpu-aot`",
    "device": "`scripts/on_rocm` on an AMD machine",
}

CLAIMS = (
    Claim(
        "lower",
        "Every program lowers for ROCm: {kinds} kinds of {models} models, {lowerings} lowerings for {archs} on meshes "
        "of {meshes}. Collectives are the declared ones, partitions are the mesh's, no host is called, no custom call "
        "but Pallas kernels through Triton",
    ),
    Claim("lower", "float8 is multiplied in each architecture's own format ({float8})"),
    Claim(
        "isa",
        "Every kernel compiles to machine code ({archs}; {kernels} kernels, {cases} cases): no spilled register, "
        "shared memory fits, matrix instructions of the expected kind",
    ),
    Claim(
        "aot",
        "The SPMD programs pass XLA's GPU pipeline for 8 devices ({programs} of them, CUDA's compiler, {topology}) "
        "with the declared kinds of collectives; the largest takes {most} of temporary memory a device",
    ),
    Claim("aot", "What selects 2048 keys in the indexer's compiled programs: {selection}"),
    Claim("device", "Numbers equal the reference's{on}", test="test_numerics"),
    Claim("device", "The server answers right in bfloat16 and compiles nothing after ready{on}", test="test_warm_up"),
    Claim(
        "device",
        "RCCL: the int32 maximum over several devices is exact from 1 KiB to 256 MiB and ends in time{on}",
        test="test_collectives",
    ),
    Claim("device", "HIP graphs on and off give the same numbers{on}", test="test_graphs"),
    Claim("device", "The profiler shows events of every device{on}", test="test_profiler"),
    Claim("device", "float8 scores are those of the numbers the keys hold{on}", test="test_float8"),
    Claim("device", "Speed{on}: see the report", test="speed"),
)


def read_results(file: Path = RESULTS) -> dict[str, Result]:
    """The last result of each rung; none where the file is missing."""
    if not file.is_file():
        return {}
    return {r["rung"]: Result(**r) for r in json.loads(file.read_text(encoding="utf-8"))}


def read_report(file: Path) -> Result:
    """The result in a report that scripts/on_rocm wrote on an AMD machine. Raises ValueError that says why there is
    none."""
    try:
        claims = json.loads(file.read_text(encoding="utf-8"))["claims"]
        result = None if claims is None else Result(**claims)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no report of scripts/on_rocm") from error
    if result is None:
        raise ValueError(f"{file} measures nothing: it is of --smoke, or of a machine without an AMD GPU")
    if result.rung != "device":
        raise ValueError(f"{file} is no report of scripts/on_rocm: its rung is {result.rung!r}, not 'device'")
    return result


def write_results(results: Mapping[str, Result], file: Path = RESULTS) -> None:
    text = json.dumps([asdict(results[rung]) for rung in RUNGS if rung in results], indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def block_of(results: Mapping[str, Result]) -> str:
    """The marked block: the claims, then each rung's own tables."""
    lines = [BEGIN, "", "| claim | rung | result |", "|---|---|---|"]
    for claim in CLAIMS:
        result = results.get(claim.rung)
        status = claim.status(result)
        if result is None or status is None:
            lines.append(f"| {_bare(claim.text)} | {RUNGS[claim.rung]} | {NOT_MEASURED} |")
            continue
        text = claim.text.format_map(result.numbers)
        lines.append(f"| {text} | {RUNGS[claim.rung]} | {status}, {result.date}, jax {result.jax} |")
    for result in results.values():
        for title, table in result.numbers.get("tables", {}).items():
            lines += ["", f"### {title}", "", *table]
    return "\n".join([*lines, "", END])


def _bare(text: str) -> str:
    """A claim's text before its numbers."""
    return text.split("{")[0].rstrip(" :(,")


def current_block(file: Path = DOCUMENT) -> str:
    """The block as the document has it. Raises ValueError where the marks are missing."""
    text = file.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{file} must hold the two marks once: {BEGIN} and {END}")
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def write_docs(new: Mapping[str, Result], document: Path = DOCUMENT, file: Path = RESULTS) -> None:
    """Puts new results beside the kept ones and writes both files."""
    results = {**read_results(file), **new}
    ordered = {rung: results[rung] for rung in RUNGS if rung in results}
    text = document.read_text(encoding="utf-8")
    document.write_text(text.replace(current_block(document), block_of(ordered)), encoding="utf-8")
    write_results(ordered, file)


def markdown_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
