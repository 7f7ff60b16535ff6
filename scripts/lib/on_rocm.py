"""Everything that can only be known on an AMD machine, run there in one go, and one file of what came out.

Needs the project's packages; `scripts/on_rocm` brings them, or run `python -m scripts.lib.on_rocm --here` in an
environment of your own. Every step is a process of its own with a time limit: one that fails or hangs loses nothing
else.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
_KEPT_LINES = 400  # of a step's output, the last ones
_MADE_DEVICES = 2  # on a CPU, so that the striped forms are tried too


@dataclass(frozen=True)
class Step:
    """command: after the interpreter, with {tp} for the devices and {out} for the folder of results. smoke: what stands
    in its place to see on any machine that the step runs at all; empty for none. writes: a JSON file of its own."""

    name: str
    what: str
    command: tuple[str, ...]
    smoke: tuple[str, ...] = ()
    minutes: float = 30.0
    writes: str = ""


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"scripts.lib.{name}", *arguments)


_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={out}/tests.xml")
_TOWER = ("--width", "1152", "--depth", "27")
_SMALL_SWEEP = ("--shape", "tiny-glm", "--sweep", "--prompts", "200", "--tokens-out", "4", "--prefill-tokens", "64")
_SMALL_TOWER = ("--width", "64", "--depth", "1", "--out", "32", "--max-pixels", "65536", "--min-pixels", "4096")

PLAN = (
    Step(
        "doctor",
        "versions, devices, environment, the exact collective",
        ("-m", "serving", "doctor"),
        ("-m", "serving", "doctor"),
        10,
    ),
    Step(
        "tests",
        "numbers, warm-up and compile counts, collectives from 1 KiB to 256 MiB, HIP graphs, profiler, float8",
        (*_TESTS, "-m", "rocm or gpu"),
        (*_TESTS, "-m", "rocm", "--any-device", "-k", "float8 or profiler or graphs"),
        90,
    ),
    Step(
        "bursts",
        "two bursts of image chats on fresh servers, images of all requests in one call and request by request",
        _module("bench_serving", "--shape", "8b", "--only", "bursts", "--tp", "{tp}", "--json", "{out}/bursts.json"),
        _module(
            "bench_serving",
            "--shape",
            "tiny",
            "--only",
            "bursts",
            "--servers",
            "1",
            "--requests",
            "2",
            "--size",
            "64",
            "--tokens-in",
            "64",
            "--tokens-out",
            "4",
            "--prefill-tokens",
            "64",
            "--json",
            "{out}/bursts.json",
        ),
        90,
        "bursts.json",
    ),
    Step(
        "prompt sweep",
        "8k and 50k prompts at growing concurrency, indexer rows striped and not",
        _module("bench_serving", "--shape", "glm", "--sweep", "--tp", "{tp}", "--json", "{out}/sweep.json"),
        _module("bench_serving", *_SMALL_SWEEP, "--concurrency", "2", "--tp", "{tp}", "--json", "{out}/sweep.json"),
        120,
        "sweep.json",
    ),
    Step(
        "long prompts",
        "the longest prompts by themselves, indexer rows striped and not",
        _module(
            "bench_serving",
            "--shape",
            "glm",
            "--sweep",
            "--prompts",
            "100000",
            "--concurrency",
            "1",
            "4",
            "--tp",
            "{tp}",
            "--json",
            "{out}/long.json",
        ),
        minutes=60,
        writes="long.json",
    ),
    Step(
        "vision",
        "a tower request by request, batched, and over the devices; warm-up cold and from the disk cache",
        _module(
            "bench_vision", *_TOWER, "--max-pixels", "16777216", "--no-rival", "--cosine", "--json", "{out}/vision.json"
        ),
        _module(
            "bench_vision",
            *_SMALL_TOWER,
            "--grids",
            "4x4",
            "--images",
            "2",
            "--rounds",
            "1",
            "--no-rival",
            "--no-start-up",
            "--json",
            "{out}/vision.json",
        ),
        45,
        "vision.json",
    ),
    Step(
        "sizes",
        "every image size after warm-up: nothing may compile",
        _module("sweep_sizes", *_TOWER, "--tp", "{tp}"),
        _module("sweep_sizes", *_SMALL_TOWER, "--tp", "{tp}"),
        30,
    ),
    Step(
        "indexer",
        "scores, selection, whole layers, a device's striped share",
        _module("bench_indexer", "--tp", "{tp}", "--json", "{out}/indexer.json"),
        _module("bench_indexer", "--quick", "--seconds", "0.1", "--tp", "{tp}", "--json", "{out}/indexer.json"),
        45,
        "indexer.json",
    ),
    Step(
        "kernels",
        "each kernel beside what the device could do",
        _module("bench_kernels", "--json", "{out}/kernels.json"),
        minutes=30,
        writes="kernels.json",
    ),
    Step(
        "profile",
        "device time by named scope: vision call, indexer layer, decode pass",
        _module("profile_step", "--out", "{out}/profile"),
        _module("profile_step", "--out", "{out}/profile", "--runs", "1", "--only", "indexer"),
        20,
        "profile/profile.json",
    ),
)


@dataclass
class Outcome:
    """status: "passed", "failed", "hung" or "skipped". output: the end of what it printed. results: its own JSON."""

    name: str
    status: str
    command: str = ""
    seconds: float = 0.0
    output: list[str] = field(default_factory=list)
    results: Any = None


def command_of(step: Step, *, smoke: bool, tp: int, out: Path) -> list[str] | None:
    """The command line of a step, None where it has none in this mode."""
    parts = step.smoke if smoke else step.command
    if not parts:
        return None
    return [sys.executable, *(part.format(tp=tp, out=out) for part in parts)]


def run_step(step: Step, command: list[str], out: Path) -> Outcome:
    """Runs one step in a process group of its own, which is killed at the time limit."""
    begin, log = time.monotonic(), out / f"{step.name.replace(' ', '_')}.log"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "passed" if process.wait(60 * step.minutes) == 0 else "failed"
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(stopped, KeyboardInterrupt):
                raise
            status = "hung"
    outcome = Outcome(step.name, status, shlex.join(["python", *command[1:]]), time.monotonic() - begin)
    outcome.output = log.read_text(errors="replace").splitlines()[-_KEPT_LINES:]
    results = out / step.writes
    if step.writes and results.is_file():
        with contextlib.suppress(ValueError):  # killed while it wrote: its output is all there is
            outcome.results = json.loads(results.read_text(encoding="utf-8"))
    return outcome


def read_tests(junit: Path) -> dict[str, str]:
    """{test file of tests/rocm, without ending: "passed", "failed" or "skipped"} of a pytest report; a file counts as
    skipped when all of it was."""
    found: dict[str, set[str]] = {}
    if not junit.is_file():
        return {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = case.get("classname", "").split(".")
        kinds = {child.tag for child in case}
        status = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        if "rocm" in name:
            found.setdefault(name[name.index("rocm") + 1], set()).add(status)
    order = ("failed", "passed", "skipped")
    return {name: next(status for status in order if status in statuses) for name, statuses in found.items()}


def claims_of(outcomes: Sequence[Outcome], tests: Mapping[str, str], device: str, count: int) -> dict[str, Any]:
    """What docs/rocm.md takes from a report: a Result of scripts.lib.rocm_claims, as JSON."""
    import jax

    failed = [o.name for o in outcomes if o.status in ("failed", "hung")]
    measured = any(o.status == "passed" and o.results is not None for o in outcomes)
    numbers = {
        "on": f" on {count} x {device}",
        "tests": {**tests, "speed": "passed" if measured else "skipped"},
        "failed": failed,
    }
    return {
        "rung": "device",
        "passed": not failed,
        "numbers": numbers,
        "date": date.today().isoformat(),
        "jax": jax.__version__,
    }


def summary(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="what came out", title_justify="left", box=None, padding=(0, 2))
    for column in ("step", "", "minutes", "last line"):
        table.add_column(column, overflow="fold")
    for o in outcomes:
        last = next((line for line in reversed(o.output) if line.strip()), "")
        table.add_row(o.name, o.status, f"{o.seconds / 60:.1f}", last[:90])
    return table


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/on_rocm",
        description="Tries and measures everything on a machine with one or several AMD Instinct GPUs: the doctor, the "
        "tests marked rocm and gpu, two bursts of image chats, prompt sweeps with and without striping, vision, "
        "indexer and kernel benchmarks, a profile. Takes hours; every step has a time limit and none stops the next. "
        "Writes one file, which holds no host name, path or key, to send back.",
        epilog="example: scripts/on_rocm --report report.json",
    )
    names = [step.name for step in PLAN]
    parser.add_argument("--report", type=Path, metavar="FILE", default=Path("rocm-report.json"))
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=f"of: {', '.join(names)}")
    parser.add_argument("--skip", nargs="+", choices=names, metavar="STEP", default=[])
    parser.add_argument("--tp", type=int, help="devices to use (default: all of them)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny forms on whatever device there is, to see that it runs"
    )
    parser.add_argument("--here", action="store_true", help="use the Python at hand, make no environment")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(width=140, highlight=False)
    steps = [s for s in PLAN if s.name not in options.skip and (not options.only or s.name in options.only)]
    if options.dry_run:
        for step in steps:
            command = command_of(step, smoke=options.smoke, tp=options.tp or 8, out=Path("OUT"))
            shown = shlex.join(["python", *command[1:]]) if command else "(not in the smoke form)"
            console.print(f"{step.name}: {step.what}; at most {step.minutes:g} min\n    {shown}", soft_wrap=True)
        return 0
    # A process of its own asks for the devices: this one must not hold them while the steps run.
    asked = subprocess.run([sys.executable, "-c", _DEVICES], cwd=ROOT, capture_output=True, text=True, check=False)
    if asked.returncode:
        console.print(f"error: jax does not start here:\n{asked.stderr[-2000:]}", markup=False)
        return 2
    device = json.loads(asked.stdout.splitlines()[-1])
    if device["kind"] != "rocm" and not options.smoke:
        console.print(
            f"error: jax sees {device['count']} x {device['name']} ({device['kind']}), no AMD GPU; run "
            f"`python -m serving doctor`, or --smoke to try the steps in tiny form",
            soft_wrap=True,
        )
        return 2
    tp = options.tp or (_MADE_DEVICES if device["kind"] == "cpu" else device["count"])
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for number, step in enumerate(steps, 1):
            command = command_of(step, smoke=options.smoke, tp=tp, out=out)
            if command is None:
                outcomes.append(Outcome(step.name, "skipped"))
                continue
            with console.status(f"{number} of {len(steps)}: {step.name} ({step.what}), at most {step.minutes:g} min"):
                outcomes.append(run_step(step, command, out))
            console.print(f"{number} of {len(steps)}: {step.name}: {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s")
        tests = read_tests(out / "tests.xml")
    hidden = {str(ROOT): "<project>", str(Path.home()): "<home>", folder: "<out>"}
    measured = device["kind"] == "rocm" and not options.smoke
    report = {
        "device": device,
        "smoke": options.smoke,
        "steps": [vars(outcome) for outcome in outcomes],
        # Tiny forms, and whatever ran on another device, say nothing of an AMD GPU.
        "claims": claims_of(outcomes, tests, device["name"], device["count"]) if measured else None,
    }
    text = json.dumps(report, indent=1)
    for path, name in hidden.items():
        text = text.replace(path, name)
    options.report.write_text(text + "\n", encoding="utf-8")
    console.print(summary(outcomes))
    console.print(f"send back {options.report}" if measured else f"{options.report} measures nothing of an AMD GPU")
    return 0 if all(o.status in ("passed", "skipped") for o in outcomes) else 1


_DEVICES = """
import json, jax
from vitstripe.platform import platform_of
devices = [platform_of(d) for d in jax.devices()]
print(json.dumps({"kind": devices[0].kind, "arch": devices[0].arch, "name": devices[0].name, "count": len(devices),
                  "jax": jax.__version__, "platform_version": jax.devices()[0].client.platform_version}))
"""

if __name__ == "__main__":
    sys.exit(main())
