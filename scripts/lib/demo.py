"""scripts/demo: two servers, a burst of questions about pictures, a long prompt, and one table to judge them by."""

import argparse
import base64
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.lib import demo_sight
from scripts.lib.demo_both import Sizes, both_halves
from scripts.lib.server_process import ROOT, ServerProcess, serving

DIGITS = ROOT / "serving" / "assets" / "digits"
PHOTOS = ROOT / "tests" / "data" / "photos"
SIGHT, RECALL = (ROOT / "serving" / "assets" / name for name in ("sight", "recall"))
"""The embedded models; without them the digit reader and a model of random weights do."""
RECALL_TOKENS = 2048
SPARSE_MODEL = ROOT / "tests" / "goldens" / "glm_moe_dsa"
BURST = 16
TP = 2
READY_SECONDS = 300

console = Console(highlight=False)


@dataclass
class Reply:
    """What one request got. ttft, seconds: from sending, in seconds."""

    name: str
    label: str | None
    error: str = ""
    text: str = ""
    model: str = ""
    ttft: float | None = None
    seconds: float = 0.0
    usage: dict = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)


@contextmanager
def started(model: str, *more: str) -> Iterator[ServerProcess]:
    """A server of its own process on TP host devices, ready; stopped at the end. What it says is shown."""
    flags = ["--model", model, "--tp", str(TP), *more]
    console.print(f"\n[bold]$ python -m serving {' '.join(flags)}[/bold]")
    with serving(flags, None, READY_SECONDS) as server:
        yield server


def stream(port: int, path: str, body: dict, reply: Reply) -> Reply:
    """Sends a streaming request and fills the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            reply.error = f"{response.status}: {json.loads(response.read())['error']['message']}"
            return reply
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                reply.error = event["error"]["message"]
                return reply
            reply.model = event["model"]
            reply.usage = event.get("usage") or reply.usage
            reply.calls = event.get("vitstripe", {}).get("vit_calls", reply.calls)
            for choice in event["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                if piece and reply.ttft is None:
                    reply.ttft = time.perf_counter() - began
                reply.text += piece
    except OSError as error:
        reply.error = f"{type(error).__name__}: {error}"
    finally:
        reply.seconds = time.perf_counter() - began
        connection.close()
    return reply


def image_request(path: Path) -> dict:
    mime = {"jpg": "jpeg"}.get(path.suffix[1:], path.suffix[1:])
    url = f"data:image/{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "digit?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}


def pick_images() -> list[tuple[Path, str | None]]:
    """BURST images, photographs and digits mixed: (file, the right answer or None)."""
    photos = sorted(p for p in PHOTOS.iterdir() if p.suffix in (".jpg", ".png", ".webp"))[:6]
    digits = sorted(DIGITS.glob("digit_*.png"))[::2][: BURST - len(photos)]
    mixed = [(p, p.name.split("_")[1]) for p in digits] + [(p, None) for p in photos]
    return [mixed[i * 7 % len(mixed)] for i in range(len(mixed))]


def burst(port: int, requests: list[tuple[dict, Reply]]) -> list[Reply]:
    """Sends all at once and fills the replies."""
    with ThreadPoolExecutor(BURST) as pool:
        jobs = [pool.submit(stream, port, "/v1/chat/completions", body, reply) for body, reply in requests]
        return [job.result() for job in jobs]


def ask_digits(port: int) -> list[Reply]:
    replies = burst(port, [(image_request(path), Reply(path.name, label)) for path, label in pick_images()])
    show_burst(replies)
    return replies


def ask_sight(port: int) -> list[Reply]:
    photos = [p for p in sorted(PHOTOS.iterdir()) if p.suffix in (".jpg", ".png", ".webp")]
    asked = [*demo_sight.drawn(SIGHT, BURST - len(photos)), *demo_sight.on_photographs(photos)]
    replies = burst(port, [(one.body, Reply(one.what, one.answer)) for one in asked])
    demo_sight.show(console, asked, replies)
    return replies


def printable(text: str, width: int = 12) -> str:
    text = text.encode("unicode_escape").decode()
    return text if len(text) <= width else text[: width - 1] + "…"


def show_burst(replies: list[Reply]) -> None:
    table = Table(
        title=f"{len(replies)} chat requests at once, one image each",
        caption="the demo model reads one digit and nothing else; what it says of a photograph means nothing",
    )
    for name, justify in (
        ("image", "left"),
        ("tokens", "right"),
        ("TTFT ms", "right"),
        ("ViT call", "right"),
        ("answer", "left"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)
    for r in replies:
        tokens = str(r.usage.get("prompt_tokens_details", {}).get("image_tokens", "?"))
        calls = ", ".join(map(str, r.calls)) or "cache"
        if r.error:
            verdict, answer = "[red]failed[/red]", r.error
        elif r.label is None:
            verdict, answer = "[dim]no digit in it[/dim]", printable(r.text)
        else:
            answer = printable(r.text)
            verdict = "[green]right[/green]" if r.text == r.label else f"[red]wrong: {r.label}[/red]"
        table.add_row(
            Path(r.name).stem, tokens, "-" if r.ttft is None else f"{r.ttft * 1000:.0f}", calls, answer, verdict
        )
    console.print(table)


def check_burst(replies: list[Reply], counts: dict[str, float], model: str, least_right: float) -> list[str]:
    """Prints what the encoder did; returns what is wrong. least_right: the share of the answers that must be."""
    calls = counts["vit_calls_total"]
    per_call = {c: sum(c in r.calls for r in replies) for r in replies for c in r.calls}
    lanes = counts["vit_lanes_filled_sum"] / max(calls, 1)
    padding = counts["vit_padded_patch_ratio_sum"] / max(calls, 1)
    compiles = counts['compiles_total{stage="after_ready"}']
    known = [r for r in replies if r.label is not None]
    right = sum(r.text.strip() == r.label for r in known)
    ttfts = sorted(r.ttft for r in replies if r.ttft is not None) or [0.0]
    facts = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in (
        ("model", ", ".join(sorted({r.model for r in replies}))),
        ("right", f"{right} of {len(known)}"),
        ("TTFT median / worst", f"{ttfts[len(ttfts) // 2] * 1000:.0f} / {ttfts[-1] * 1000:.0f} ms"),
        ("images a ViT call", ", ".join(f"{n}" for _, n in sorted(per_call.items())) + f"  ({calls:.0f} calls)"),
        ("lanes filled", f"{lanes:.2f} of {TP} on average"),
        ("padding", f"{padding:.0%} of the computed patches"),
        ("compiles after ready", f"{compiles:.0f}"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    problems = [f"{r.name}: {r.error}" for r in replies if r.error]
    if right < least_right * len(known):
        problems.append(f"{len(known) - right} of {len(known)} answers were wrong")
    if compiles:
        problems.append(f"{compiles:.0f} programs were compiled after ready")
    if lanes <= 1:
        # A call of one image, the burst's first arrival, may fill one lane; all of them may not.
        problems.append(f"no ViT call filled more than one of {TP} lanes")
    if {r.model for r in replies if not r.error} != {model}:
        problems.append(f"another model answered: {sorted({r.model for r in replies})}")
    if any(r.usage.get("prompt_tokens_details", {}).get("image_tokens", 0) < 1 for r in replies if not r.error):
        problems.append("a reply counted no image tokens")
    if calls >= len(replies):
        problems.append(f"{calls:.0f} ViT calls for {len(replies)} requests: nothing was batched across them")
    return problems


def long_prompt() -> str:
    """About 1200 tokens for the byte-level test tokenizer, no two sentences alike."""
    return " ".join(f"Box {n} holds {n * n % 97} grey stones and {n * 31 % 89} red ones." for n in range(1, 28))


def compare_selections(model: Path, prompt: str) -> tuple[int, int]:
    """(rows compared, rows equal) of the striped and a separately compiled replicated program on this prompt."""
    command = [sys.executable, "-m", "scripts.lib.compare_selections", str(model), str(TP)]
    with console.status("compiling the replicated and the striped program apart, and comparing their selections"):
        done = subprocess.run(command, cwd=ROOT, input=prompt, text=True, capture_output=True, check=False)
    match = re.search(r"(\d+) of (\d+) rows equal", done.stdout)
    if done.returncode or not match:
        raise SystemExit(f"comparing selections failed:\n{done.stderr}")
    return int(match[2]), int(match[1])


def sparse_path(server: ServerProcess) -> list[str]:
    """The long prompt on the sparse-attention server; prints its table, returns what is wrong."""
    has_recall, prompt, answer = has(RECALL), long_prompt(), None
    model = RECALL if has_recall else SPARSE_MODEL
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    if has_recall:
        prompt, answer = demo_sight.hidden_number(RECALL, RECALL_TOKENS)
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
    reply = stream(server.port, "/v1/completions", body, Reply("long prompt", answer))
    counts = server.metrics()
    striped = counts['indexer_rows_total{path="striped"}']
    replicated = counts['indexer_rows_total{path="replicated"}']
    compiles = counts['compiles_total{stage="after_ready"}']
    rows, equal = compare_selections(model, long_prompt())
    topk = json.loads((model / "config.json").read_text())["index_topk"]
    facts = Table(show_header=False, box=None, padding=(0, 2), title="one long prompt, sparse attention")
    for name, value in (
        ("model", reply.model if has_recall else f"{reply.model} (random weights)"),
        ("prompt", f"{reply.usage.get('prompt_tokens', 0)} tokens, each attends to {topk} selected"),
        ("TTFT", "-" if reply.ttft is None else f"{reply.ttft * 1000:.0f} ms"),
        ("rows striped / replicated", f"{striped:.0f} / {replicated:.0f}"),
        ("striped = replicated", f"{equal} of {rows} selections, compiled apart"),
        ("compiles after ready", f"{compiles:.0f}"),
    ):
        facts.add_row(name, value)
    if answer is not None:
        facts.add_row("the hidden number", f"{reply.text.strip()}, {answer} is right")
    console.print(facts)
    problems = []
    if answer is not None and not reply.error and reply.text.strip() != answer:
        problems.append(f"the hidden number is {answer}; the answer was {reply.text.strip()!r}")
    if reply.error:
        problems.append(f"the long prompt: {reply.error}")
    if reply.usage.get("prompt_tokens", 0) < 8 * topk:
        problems.append(f"the long prompt has only {reply.usage.get('prompt_tokens', 0)} tokens, K is {topk}")
    if not striped:
        problems.append("no row of the long prompt went the striped way")
    if equal != rows or not rows:
        problems.append(f"the striped selection differs from the replicated one in {rows - equal} of {rows} rows")
    if compiles:
        problems.append(f"{compiles:.0f} programs were compiled after ready on the sparse-attention server")
    return problems


def has(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Starts the server on two host devices, sends it a burst of questions about pictures, "
        "then a long prompt to a second server with sparse attention, and shows what came back. Runs on a CPU.",
    )
    parser.add_argument("--keep", action="store_true", help="leave the first server up at the end, until Ctrl-C")
    parser.add_argument("--page", action="store_true", help="instead: a server with a page to ask it from a browser")
    parser.add_argument("--model", metavar="FOLDER", help="instead: a checkpoint whose two halves are to work at once")
    parser.add_argument("--tp", type=int, default=TP, help="devices for --model")
    parser.add_argument("--images", type=int, default=64, help="requests with an image for --model")
    parser.add_argument("--prompts", type=int, default=4, help="long prompts for --model")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="tokens of each of them")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.model:
        sizes = Sizes(options.images, options.prompts, options.prompt_tokens)
        return conclude(both_halves(console, options.model, options.tp, sizes), began)
    sight = has(SIGHT)
    if options.page:
        with started("sight" if sight else "digits", "--page") as server:
            console.print(f"\n[bold]{server.url}/[/bold]  drop a picture there and ask. Ctrl-C stops it.")
            return until_stopped(server)
    with started("sight" if sight else "digits", *(["--page"] if options.keep else [])) as server:
        replies = ask_sight(server.port) if sight else ask_digits(server.port)
        expected = ("sight", demo_sight.LEAST_RIGHT) if sight else ("digits_vlm", 1.0)
        problems = check_burst(replies, server.metrics(), *expected)
        with started("recall" if has(RECALL) else str(SPARSE_MODEL.relative_to(ROOT))) as other:
            problems += sparse_path(other)
        status = conclude(problems, began)
        if options.keep:
            console.print(f"\nthe first server is still up: {server.url}/ is its page, {server.url}/v1 its API")
            console.print("Ctrl-C stops it.")
            return until_stopped(server) or status
    return status


def until_stopped(server: ServerProcess) -> int:
    """Waits for Ctrl-C, or for the server's own end, whose exit status it returns."""
    assert server.process is not None
    try:
        return server.process.wait()
    except KeyboardInterrupt:
        console.print("stopping")
    return 0


def conclude(problems: list[str], began: float) -> int:
    """Prints what is wrong, or that nothing is; the exit status."""
    for problem in problems:
        console.print(f"[red]FAILED[/red] {problem}")
    if not problems:
        console.print(f"\n[green]all right[/green] after {time.perf_counter() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
