"""scripts/soak: a server under mixed traffic for minutes, then SIGTERM under load, and a table of what must be zero."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.lib.mixed_traffic import CHAT, Clients, Job, Mix, Tally
from scripts.lib.server_process import ServerProcess, serving, settled

_SETTLE_SECONDS = 120.0
_JUDGED_MINUTES = 5.0
_SLOPE_LIMIT = 1.0
_BURST_SECONDS = 15.0
_COMPILES = 'compiles_total{stage="after_ready"}'
_FLAGS = ["--max-model-len", "256", "--max-seqs", "8", "--max-queue", "16", "--prefill-tokens", "128"]

console = Console(highlight=False, stderr=True)


@dataclass
class Report:
    """What was seen. largest_n: that the server takes. slope_mib: resident memory, MiB a minute, after the first
    `settle_seconds`."""

    minutes: float
    largest_n: int = 1
    requests: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    busy: int = 0
    tokens: int = 0
    digits_right: int = 0
    digits_wrong: int = 0
    problems: dict[str, int] = field(default_factory=dict)
    memory_mib: list[tuple[float, float]] = field(default_factory=list)
    settle_seconds: float = 0.0
    slope_mib: float = 0.0
    leaked: dict[str, float] = field(default_factory=dict)
    compiles_after_ready: float = 0.0
    exit_code: int | None = None

    def failures(self) -> list[str]:
        found = [f"{count} x {text}" for text, count in self.problems.items()]
        if sum(self.ends.values()) != self.requests:
            found.append(f"{self.requests} requests were sent and {sum(self.ends.values())} ended")
        if self.ends.get("LOST") or self.ends.get("gave up: always busy"):
            found.append("requests were lost")
        if not self.ends.get("answered"):
            found.append("nothing was answered")
        if self.digits_wrong:
            found.append(f"{self.digits_wrong} digits were read wrong: somebody else's answer, or a damaged one")
        if self.leaked:
            found.append(f"held by an idle server: {self.leaked}")
        if self.compiles_after_ready:
            found.append(f"{self.compiles_after_ready:.0f} programs were compiled after ready")
        if self.is_judged() and self.slope_mib >= _SLOPE_LIMIT:
            found.append(f"memory grows by {self.slope_mib:.2f} MiB a minute; the limit is {_SLOPE_LIMIT:g}")
        if self.exit_code != 0:
            found.append(f"the server's exit code after SIGTERM was {self.exit_code}")
        return found

    def is_judged(self) -> bool:
        """Whether the run was long enough for its memory slope to mean something."""
        return self.minutes >= _JUDGED_MINUTES


def slope_per_minute(samples: list[tuple[float, float]], after: float) -> float:
    """Least-squares slope of (seconds, MiB) from `after` seconds on, in MiB a minute."""
    kept = np.array([sample for sample in samples if sample[0] >= after])
    return float(np.polyfit(kept[:, 0] / 60, kept[:, 1], 1)[0]) if len(kept) > 2 else 0.0


class Soak:
    def __init__(self, server: ServerProcess, args: argparse.Namespace, most_answers: int):
        self.server, self.args, self.tally = server, args, Tally()
        self.mix = Mix(args.seed, most_answers=most_answers)
        self.clients = Clients(server.url, self.tally)
        self.report = Report(args.minutes, most_answers)
        self._sent = 0

    def send(self, job: Job) -> Coroutine[Any, Any, None]:
        self._sent += 1
        return self.clients.run(job)

    async def run(self) -> Report:
        seconds = 60 * self.args.minutes
        began = time.monotonic()
        with self._bar() as bar:
            task = bar.add_task("soak", total=seconds, seen="")
            watch = asyncio.create_task(self._watch(began, bar, task))
            bursts = asyncio.create_task(self._bursts(began + seconds))
            await asyncio.gather(*[self._worker(began + seconds) for _ in range(self.args.clients)])
            await bursts
            watch.cancel()
        report = self.report
        report.leaked = await asyncio.to_thread(settled, self.server)
        report.compiles_after_ready = self.server.metrics().get(_COMPILES, 0.0)
        await self._stop()
        await self.clients.close()
        tally = self.tally
        report.requests, report.ends, report.kinds = self._sent, dict(tally.ends), dict(tally.kinds)
        report.busy, report.tokens = tally.busy, tally.tokens
        report.digits_right, report.digits_wrong = tally.right, tally.wrong
        report.problems = dict(tally.problems)
        report.settle_seconds = min(_SETTLE_SECONDS, 0.4 * seconds)
        report.slope_mib = slope_per_minute(report.memory_mib, report.settle_seconds)
        return report

    async def _worker(self, until: float) -> None:
        while time.monotonic() < until:
            await self.send(self.mix.job())

    async def _bursts(self, until: float) -> None:
        """Every now and then more at once than the queue holds, and time for them to come back."""
        while time.monotonic() + 2 < until:
            await asyncio.gather(*[self.send(self.mix.job()) for _ in range(self.args.burst)])
            await asyncio.sleep(min(_BURST_SECONDS, max(0.0, until - time.monotonic())))

    async def _watch(self, began: float, bar: Progress, task: Any) -> None:
        while True:
            seen = time.monotonic() - began
            if not self.server.is_alive():
                raise SystemExit(f"error: the server died:\n{self.server.log_tail()}")
            self.report.memory_mib.append((round(seen, 1), round(self.server.rss_mib(), 2)))
            bar.update(task, completed=seen, seen=f"{self._sent} sent, {self.tally.ends['answered']} answered")
            await asyncio.sleep(1.0)

    async def _stop(self) -> None:
        """SIGTERM under load. What runs is to end in order, what comes later is to be told, and the exit code is 0."""
        running = [asyncio.create_task(self.send(self._long_job(stream=k % 2 == 0))) for k in range(8)]
        await asyncio.sleep(0.5)
        self.server.terminate()
        self.clients.stopping = True
        later = [asyncio.create_task(self.send(self.mix.job())) for _ in range(8)]
        await asyncio.gather(*running, *later)
        assert self.server.process is not None
        self.report.exit_code = await asyncio.to_thread(self.server.process.wait, 60)

    def _long_job(self, stream: bool) -> Job:
        body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 150, "ignore_eos": True}
        return Job("at SIGTERM", CHAT, body | {"stream": stream})

    def _bar(self) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[seen]}"),
        )
        return Progress(*columns, console=console, transient=True)


def table_of(report: Report) -> Table:
    table = Table(title=f"{report.requests} requests in {report.minutes:g} minutes", show_header=False)
    table.add_column("what")
    table.add_column("count", justify="right")
    for end, count in sorted(report.ends.items(), key=lambda item: -item[1]):
        table.add_row(end, str(count))
    table.add_section()
    table.add_row("told to come back (429, 503)", str(report.busy))
    table.add_row("tokens, largest n", f"{report.tokens}, {report.largest_n}")
    table.add_row("digits right / wrong", f"{report.digits_right} / {report.digits_wrong}")
    table.add_section()
    sizes = [size for _, size in report.memory_mib]
    judged = "" if report.is_judged() else f" (judged from {_JUDGED_MINUTES:g} minutes on)"
    table.add_row("resident memory, first to last", f"{sizes[0]:.0f} to {sizes[-1]:.0f} MiB")
    table.add_row(f"memory slope after {report.settle_seconds:.0f} s", f"{report.slope_mib:+.2f} MiB a minute{judged}")
    table.add_row("held when idle", str(report.leaked or 0))
    table.add_row("compiles after ready", f"{report.compiles_after_ready:.0f}")
    table.add_row("exit code after SIGTERM", str(report.exit_code))
    return table


def most_answers(url: str) -> int:
    """The largest n that this server takes, at most 4."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "n": 4}
    return 4 if httpx.post(url + CHAT, json=body, timeout=60).status_code == 200 else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Starts a server on two host devices and keeps it under mixed traffic: text and images, "
        "streamed or not, several answers a request, 10 %% of clients leave early, 5 %% of images are bad, bursts fill "
        "the queue, SIGTERM comes under load. Exit status 1, with the reasons, if a request was lost, an answer was "
        "another's, something stayed held, a program was compiled or memory grew.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="length (default 10)")
    parser.add_argument("--model", default="digits", help="checkpoint (default: the embedded digit reader)")
    parser.add_argument("--tp", type=int, default=2, help="devices; on a CPU they are made (default 2)")
    parser.add_argument(
        "--clients", type=int, default=12, help="clients that ask one request after the other (default 12)"
    )
    parser.add_argument("--burst", type=int, default=40, help="requests of one burst (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", args.model, "--tp", str(args.tp), *_FLAGS]
        console.print(f"$ python -m serving {' '.join(flags)}")
        with serving(flags, Path(folder) / "server.log") as server:
            report = asyncio.run(Soak(server, args, most_answers(server.url)).run())
            if report.failures():
                console.print(server.log_tail(5), markup=False)
    Console(highlight=False).print(table_of(report))
    if args.json:
        args.json.write_text(json.dumps(asdict(report) | {"failures": report.failures()}) + "\n")
    for failure in report.failures():
        console.print(f"[red]FAILED[/red] {failure}")
    return int(bool(report.failures()))


if __name__ == "__main__":
    sys.exit(main())
