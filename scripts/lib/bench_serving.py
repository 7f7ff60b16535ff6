"""Serves a made-up model on this machine's device and measures what clients see. See --help."""

import argparse
import contextlib
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from scripts.lib.load_clients import Reply, ask, ask_all, chat, image_of, text_of
from scripts.lib.made_up_model import SHAPES
from scripts.lib.server_process import ROOT, ServerProcess, serving

READY_SECONDS = 900
IMAGE_MARKS = 2  # tokens that the chat template puts around the tokens of an image
MEAN_RATIO, P99_RATIO = 1.03, 1.08  # of the first burst to the second, at most

console = Console(width=120, highlight=False)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="scripts/bench_serving",
        description=(
            "Starts servers with random weights made on the device and measures them with clients in another process. "
            "Bursts: after a few text-only requests, two bursts of chats with images on each of several fresh servers, "
            "with images of all requests in one call and request by request. Passes: a decode pass and a prefill pass "
            "by themselves, beside what the device could do. Sweep: long text at growing concurrency."
        ),
        epilog="Options that are not listed here go to the servers (python -m serving --help). "
        "Example: scripts/bench_serving --shape 8b --json serving.json --plot serving.png",
    )
    p.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="8b: Qwen3-VL-8B; glm: GLM-5.2's widths")
    p.add_argument("--servers", type=int, default=3, help="fresh servers a setting (default 3)")
    p.add_argument("--requests", type=int, default=64, help="requests a burst, all at once (default 64)")
    p.add_argument("--size", type=int, default=512, help="images are size x size (default 512)")
    p.add_argument("--tokens-in", type=int, default=1024, help="prompt tokens, the image's included")
    p.add_argument("--tokens-out", type=int, default=128)
    p.add_argument("--prefill-tokens", type=int, default=2048, help="rows of the largest prefill pass")
    p.add_argument("--tp", type=int, default=1, help="devices a server (default 1)")
    p.add_argument("--only", choices=("bursts", "passes"), action="append")
    p.add_argument("--sweep", action="store_true", help="the sweep instead, with --prompts and --concurrency")
    p.add_argument("--prompts", type=int, nargs="+", default=[8192, 50000], help="prompt tokens of the sweep")
    p.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 64, 256])
    p.add_argument("--json", type=Path, metavar="FILE")
    p.add_argument("--plot", type=Path, metavar="FILE", help="time to first token by decile (needs matplotlib)")
    options, options.server = p.parse_known_args(arguments)
    if options.plot and find_spec("matplotlib") is None:
        p.error("--plot needs matplotlib; install the extra plots")
    return options


@dataclass(frozen=True)
class Server:
    """A server that is ready. seconds: from launch to ready."""

    process: ServerProcess
    seconds: float

    @property
    def port(self) -> int:
        return self.process.port


@contextlib.contextmanager
def server(shape: str, *options: object) -> Iterator[Server]:
    """A fresh server in a process of its own, stopped at the end. Raises SystemExit with the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--shape", shape, "--folder", str(Path(folder, shape)), *map(str, options)]
        begin = time.perf_counter()
        with serving(flags, Path(folder, "log"), READY_SECONDS, module="scripts.lib.made_up_server") as process:
            yield Server(process, time.perf_counter() - begin)


def summary(replies: Sequence[Reply]) -> dict[str, Any]:
    """What a burst came to. Times in seconds; a burst that lost a request says which way."""
    good = [r for r in replies if r.is_good]
    found: dict[str, Any] = {"requests": len(replies), "good": len(good)}
    found["errors"] = sorted({f"{r.status} {r.error}" for r in replies if not r.is_good})
    if not good:
        return found
    ttft = np.array([r.ttft for r in good])
    span = max(r.sent + r.seconds for r in good) - min(r.sent for r in good)
    tokens = sum(r.usage.get("completion_tokens", 0) for r in good)
    return found | {
        "ttft_mean": float(ttft.mean()),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "ttft_deciles": np.quantile(ttft, np.linspace(0.1, 1, 10)).tolist(),
        "tpot_mean": statistics.mean(r.tpot for r in good),
        "prompt_tokens": statistics.mean(r.usage.get("prompt_tokens", 0) for r in good),
        "output_tokens_a_second": tokens / span,
        "seconds": span,
    }


def compiles_after_ready(at: Server) -> float:
    return sum(n for name, n in at.process.metrics().items() if "compiles_total" in name and "after" in name)


def engine_seconds(at: Server) -> dict[str, float]:
    """What the engine's thread has spent its time on, by the counter of that name."""
    found = {name: value for name, value in at.process.metrics().items() if name.startswith("engine_seconds_total")}
    return {name.split('"')[1]: value for name, value in found.items()}


def step_interval(replies: Sequence[Reply]) -> float:
    """Seconds from one decode step to the next while all requests are being answered: median over them. An event may
    tell several tokens, so it is these that are counted."""
    good = [r for r in replies if r.is_good]
    if not good:
        return math.nan
    begin = max(r.sent + r.ttft for r in good)
    end = min(r.sent + r.seconds for r in good)
    gaps = []
    for r in good:
        inside = [(r.sent + t, n) for t, n in zip(r.times, r.tokens, strict=True) if begin <= r.sent + t <= end]
        if len(inside) > 2 and inside[-1][1] > inside[0][1]:
            gaps.append((inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1]))
    return statistics.median(gaps) if gaps else math.nan


def burst_server(options: argparse.Namespace, batching: str, number: int) -> dict[str, Any]:
    """One fresh server: text-only requests, two bursts with images, then one of text alone for the steady state."""
    longest = options.tokens_in + options.tokens_out
    arguments = ["--max-seqs", options.requests, "--prefill-tokens", options.prefill_tokens, "--tp", options.tp]
    arguments += ["--max-model-len", -(-longest // 64) * 64, "--mm-batching", batching, *options.server]
    with server(options.shape, *arguments) as at:
        probe = ask(at.port, chat("x", None, 2))
        if not probe.is_good:
            raise RuntimeError(f"the first request failed: {probe.status} {probe.error}")
        frame = probe.usage["prompt_tokens"] - 1
        for i in range(4):
            ask(at.port, chat(text_of(options.tokens_in // 2, 1000 * number + i), None, options.tokens_out))
        image_tokens = (options.size // 32) ** 2 + IMAGE_MARKS
        length = max(options.tokens_in - frame - image_tokens, 1)

        def bodies(burst: int) -> list[dict[str, Any]]:
            seeds = [(number * 10 + burst) * options.requests + i for i in range(options.requests)]
            return [chat(text_of(length, s), image_of(options.size, s), options.tokens_out) for s in seeds]

        both = [bodies(0), bodies(1)]
        bursts = [ask_all(at.port, b) for b in both]
        texts = [text_of(options.tokens_in - frame, 77 + i) for i in range(len(both[0]))]
        text = [chat(t, None, options.tokens_out, counted=True) for t in texts]
        before = engine_seconds(at)
        steady = ask_all(at.port, text)
        spent = {doing: seconds - before[doing] for doing, seconds in engine_seconds(at).items()}
        found = {
            "batching": batching,
            "ready_seconds": at.seconds,
            "first": summary(bursts[0]),
            "second": summary(bursts[1]),
            "text": summary(steady),
            "step_interval": step_interval(steady),
            "engine_seconds": spent,
            "compiles_after_ready": compiles_after_ready(at),
        }
    first, second = found["first"], found["second"]
    if first["good"] and second["good"]:
        found["mean_ratio"] = first["ttft_mean"] / second["ttft_mean"]
        found["p99_ratio"] = first["ttft_p99"] / second["ttft_p99"]
    return found


def bursts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One server after another."""
    for number in range(options.servers):
        for batching in ("always", "never"):
            one = burst_server(options, batching, number)
            first, second = (one[b].get("ttft_mean", math.nan) for b in ("first", "second"))
            console.print(
                f"server {number + 1}, batching {batching}: ready after {one['ready_seconds']:.1f} s, mean TTFT "
                f"{first:.3f} s, then {second:.3f} s"
            )
            parts = ", ".join(f"{doing} {seconds:.2f} s" for doing, seconds in one["engine_seconds"].items())
            console.print(f"  the engine's thread during a burst of text: {parts}")
            yield one


def passes(options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, so that its memory is free again when servers start."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "passes.json")
        command = [sys.executable, "-m", "scripts.lib.bench_passes", "--shape", options.shape, "--json", str(file)]
        keys = options.tokens_in + options.tokens_out // 2
        command += ["--running", str(options.requests), "--keys", str(keys), "--prompt", str(options.tokens_in)]
        command += ["--rows", str(options.prefill_tokens), "--tp", str(options.tp)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return json.loads(file.read_text())


def sweep(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prompts of text at growing concurrency; a setting that does not fit ends its row. Striping needs two devices."""
    for prompt in options.prompts:
        for stripes in (True, False) if options.tp > 1 else (False,):
            for count in options.concurrency:
                arguments = ["--max-seqs", count, "--prefill-tokens", options.prefill_tokens, "--tp", options.tp]
                arguments += ["--max-model-len", -(-(prompt + options.tokens_out) // 64) * 64]
                arguments += ["--indexer-stripes" if stripes else "--no-indexer-stripes", *options.server]
                setting = {"prompt": prompt, "concurrency": count, "striped": stripes}
                try:
                    with server(options.shape, *arguments) as at:
                        frame = ask(at.port, chat("x", None, 2)).usage["prompt_tokens"] - 1
                        bodies = [chat(text_of(prompt - frame, i), None, options.tokens_out) for i in range(count)]
                        replies = ask_all(at.port, bodies)
                        one = setting | summary(replies) | {"compiles_after_ready": compiles_after_ready(at)}
                except (SystemExit, KeyError) as error:
                    yield setting | {"error": str(error)[-500:]}
                    console.print(f"{setting}: {str(error)[-200:]}")
                    break
                console.print(f"{setting}: {one.get('output_tokens_a_second', 0):.0f} tokens/s")
                yield one


def table_of(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> Table:
    """columns: heading -> dotted path in a row."""
    table = Table(box=SIMPLE)
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = []
        for path in columns.values():
            value: Any = row
            for part in path.split("."):
                value = value.get(part, "") if isinstance(value, dict) else ""
            cells.append(f"{value:.4g}" if isinstance(value, float) else str(value))
        table.add_row(*cells)
    return table


BURST_COLUMNS = {
    "batching": "batching",
    "ready s": "ready_seconds",
    "good": "first.good",
    "good, 2nd": "second.good",
    "TTFT mean s": "first.ttft_mean",
    "2nd": "second.ttft_mean",
    "ratio": "mean_ratio",
    "p99 s": "first.ttft_p99",
    "ratio of p99": "p99_ratio",
    "tokens/s": "second.output_tokens_a_second",
    "step s": "step_interval",
    "compiles": "compiles_after_ready",
}
SWEEP_COLUMNS = {
    "prompt": "prompt",
    "requests": "concurrency",
    "striped": "striped",
    "good": "good",
    "tokens/s": "output_tokens_a_second",
    "TTFT mean s": "ttft_mean",
    "p99 s": "ttft_p99",
    "TPOT s": "tpot_mean",
    "compiles": "compiles_after_ready",
}


def problems(found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """What clients must never see, in words: lost requests and compiles. Times are reported, not judged."""
    wrong = []
    for one in found.get("bursts", []):
        for burst in ("first", "second", "text"):
            if one[burst]["good"] != options.requests:
                wrong.append(f"batching {one['batching']}, {burst}: {one[burst]['errors']}")
        if one["compiles_after_ready"]:
            wrong.append(f"batching {one['batching']}: {one['compiles_after_ready']:.0f} compiles after ready")
    ran = [one for one in found.get("sweep", []) if "error" not in one]
    if found.get("sweep") and not ran:
        wrong.append("no setting of the sweep ran")
    for one in ran:
        setting = f"{one['concurrency']} prompts of {one['prompt']} tokens"
        if one["good"] != one["concurrency"]:
            wrong.append(f"{setting}: {one['errors']}")
        if one["compiles_after_ready"]:
            wrong.append(f"{setting}: {one['compiles_after_ready']:.0f} compiles after ready")
    return wrong


def draw(file: Path, runs: Sequence[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    decile = np.arange(10, 101, 10)
    for batching, colour in (("always", "tab:blue"), ("never", "tab:orange")):
        for burst, style in (("first", "-"), ("second", "--")):
            lines = [r[burst]["ttft_deciles"] for r in runs if r["batching"] == batching and r[burst]["good"]]
            if lines:
                how = "one call" if batching == "always" else "request by request"
                rate = statistics.median(r[burst]["output_tokens_a_second"] for r in runs if r["batching"] == batching)
                label = f"{how}, {burst} burst ({rate:.0f} tokens/s)"
                axes.plot(decile, np.median(lines, axis=0), style, color=colour, label=label)
    axes.set_xlabel("% of requests")
    axes.set_ylabel("time to first token, s")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def save(found: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "shape": options.shape}
    if options.sweep:
        found["sweep"] = settings = []
        for one in sweep(options):
            settings.append(one)
            save(found, options.json)  # whatever comes of the next setting
        console.print(table_of(settings, SWEEP_COLUMNS))
    else:
        parts = options.only or ("passes", "bursts")
        if "passes" in parts:
            found["passes"] = passes(options)
        if "bursts" in parts:
            found["bursts"] = runs = []
            for one in bursts(options):
                runs.append(one)
                save(found, options.json)  # whatever comes of the next server
            console.print(table_of(runs, BURST_COLUMNS))
            ratios = [
                (r["mean_ratio"], r["p99_ratio"]) for r in runs if r["batching"] == "always" and "mean_ratio" in r
            ]
            if ratios:
                mean, p99 = (statistics.median(column) for column in zip(*ratios, strict=True))
                found["median_ratios"] = {"mean": mean, "p99": p99}
                console.print(
                    f"First to second burst, median over {len(ratios)} servers: mean {mean:.3f} (at most "
                    f"{MEAN_RATIO}), p99 {p99:.3f} (at most {P99_RATIO})."
                )
            decode = found.get("passes", {}).get("decode", {}).get("seconds")
            if decode:
                found["host_share"] = [1 - decode / r["step_interval"] for r in runs]
                console.print(
                    f"Host between steps, share of a step: {', '.join(f'{x:.1%}' for x in found['host_share'])}"
                )
            if options.plot:
                draw(options.plot, runs)
    save(found, options.json)
    for line in (wrong := problems(found, options)):
        console.print(f"error: {line}", style="red")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
