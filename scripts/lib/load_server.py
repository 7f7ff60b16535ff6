"""scripts/load_server: aiperf, a public load generator, at a fixed rate with images against the server."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.lib.server_process import ROOT, running_or_serving, settled

_FLAGS = ["--max-model-len", "1024", "--max-seqs", "8"]
_COMPILES = 'compiles_total{stage="after_ready"}'
_DEMO_TOKENIZER = ROOT / "serving" / "assets" / "digits_vlm"

console = Console(highlight=False, stderr=True)


@dataclass
class Summary:
    """Rates are a second, times milliseconds: mean, median, 99th percentile. counted: images by the server's own
    metrics, over the run."""

    requests: int
    errors: int
    asked_rate: float
    rate: float
    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]
    latency: tuple[float, float, float]
    prompt_tokens: int
    completion_tokens: int
    images_counted: float
    compiles_after_ready: float

    def failures(self, wanted: int) -> list[str]:
        found = []
        if self.errors or self.requests != wanted:
            found.append(f"{self.requests} of {wanted} requests were answered, {self.errors} failed")
        if not self.completion_tokens:
            found.append("no token was generated")
        if self.images_counted < wanted:
            found.append(f"the server counted {self.images_counted:.0f} images for {wanted} requests")
        if self.compiles_after_ready:
            found.append(f"{self.compiles_after_ready:.0f} programs were compiled after ready")
        return found


def command(args: argparse.Namespace, url: str, model: str, folder: Path) -> list[str]:
    options = {
        "model": model,
        "url": url,
        "endpoint-type": "chat",
        "tokenizer": args.tokenizer,
        "request-rate": args.rate,
        "request-rate-mode": "constant",
        "request-count": args.requests,
        "synthetic-input-tokens-mean": args.text_tokens,
        "output-tokens-mean": args.output_tokens,
        "image-width-mean": args.width,
        "image-height-mean": args.height,
        "extra-inputs": "ignore_eos:true",
        "random-seed": args.seed,
        "ui": "none",
        "output-artifact-dir": folder,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [args.aiperf, "profile", *flags, "--streaming", "--use-server-token-count"]


def three(report: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    found = report.get(name) or {}
    return found.get("avg", 0.0), found.get("p50", 0.0), found.get("p99", 0.0)


def summary_of(report: Mapping[str, Any], rate: float, before: dict[str, float], after: dict[str, float]) -> Summary:
    def average(name: str) -> float:
        return (report.get(name) or {}).get("avg") or 0.0

    seen = ("encoder_cache_hits_total", "encoder_cache_misses_total")
    return Summary(
        requests=int(average("request_count")),
        errors=sum(error.get("count", 1) for error in report.get("error_summary") or ()),
        asked_rate=rate,
        rate=average("request_throughput"),
        ttft=three(report, "time_to_first_token"),
        itl=three(report, "inter_token_latency"),
        latency=three(report, "request_latency"),
        prompt_tokens=int(average("total_usage_prompt_tokens")),
        completion_tokens=int(average("total_usage_completion_tokens")),
        images_counted=sum(after.get(name, 0.0) - before.get(name, 0.0) for name in seen),
        compiles_after_ready=after.get(_COMPILES, 0.0),
    )


def table_of(summary: Summary) -> Table:
    table = Table(title=f"{summary.requests} requests, one image each", show_header=False)
    table.add_row("requests a second, asked / reached", f"{summary.asked_rate:g} / {summary.rate:.2f}")
    for name, (mean, median, worst) in (
        ("TTFT", summary.ttft),
        ("time between tokens", summary.itl),
        ("whole request", summary.latency),
    ):
        table.add_row(f"{name}, mean / median / p99", f"{mean:.1f} / {median:.1f} / {worst:.1f} ms")
    table.add_row("tokens in / out", f"{summary.prompt_tokens} / {summary.completion_tokens}")
    table.add_row("failed", str(summary.errors))
    table.add_row("images counted by the server", f"{summary.images_counted:.0f}")
    table.add_row("compiles after ready", f"{summary.compiles_after_ready:.0f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/load_server",
        description="Starts a server on two host devices and lets aiperf send streamed chats with one random "
        "image each, at a fixed rate. Exit status 1, with the reasons, if one failed or a program was compiled.",
    )
    parser.add_argument("--aiperf", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--url", help="a server that runs already, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", default="digits", help="checkpoint to serve (default: the embedded digit reader)")
    parser.add_argument("--tokenizer", type=Path, default=_DEMO_TOKENIZER, help="folder of the model's tokenizer")
    parser.add_argument("--tp", type=int, default=2, help="devices; on a CPU they are made (default 2)")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (default 4)")
    parser.add_argument("--requests", type=int, default=200, help="requests (default 200)")
    parser.add_argument("--width", type=int, default=512, help="pixels (default 512)")
    parser.add_argument("--height", type=int, default=512, help="pixels (default 512)")
    parser.add_argument("--text-tokens", type=int, default=32, help="tokens of text in a prompt (default 32)")
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens of an answer (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and images (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary and aiperf's own report there")
    args = parser.parse_args()
    # With the hub set offline, transformers would take a folder for a repository's name.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    flags, scratch = ["--model", args.model, "--tp", str(args.tp), *_FLAGS], tempfile.TemporaryDirectory()
    with scratch as folder, running_or_serving(args.url, flags, Path(folder) / "server.log") as server:
        model = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
        before = server.metrics()
        with console.status(f"{args.requests} requests at {args.rate:g} a second"):
            done = subprocess.run(
                command(args, server.url, model, Path(folder) / "report"),
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        exported = Path(folder) / "report" / "profile_export_aiperf.json"
        if done.returncode or not exported.is_file():
            console.print(f"aiperf failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}", markup=False)
            return 1
        report = json.loads(exported.read_text())
        summary = summary_of(report, args.rate, before, server.metrics())
        failures = summary.failures(args.requests)
        if held := settled(server):
            failures.append(f"held by an idle server: {held}")
    Console(highlight=False).print(table_of(summary))
    if args.json:
        args.json.write_text(json.dumps({"summary": asdict(summary), "failures": failures, "aiperf": report}) + "\n")
    for failure in failures:
        console.print(f"[red]FAILED[/red] {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
