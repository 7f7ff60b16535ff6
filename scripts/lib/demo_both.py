"""scripts/demo --model FOLDER: one server with both halves at work, a burst of images while long prompts run, and each
answer compared with that of the request alone on one device."""

import base64
import http.client
import io
import json
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from scripts.lib.server_process import ServerProcess, serving

TOKENS = 8
NEAR = 1e-4
"""Two logits this near may change places: batched products are not the same bits as single ones."""
READY_SECONDS = 1200


@dataclass(frozen=True)
class Sizes:
    """What is sent: single-image requests, long prompts and the tokens of each."""

    images: int
    prompts: int
    prompt_tokens: int


@dataclass
class Answer:
    """error: what went wrong, or "". tokens: each with its best two log-probabilities. calls: of the vision encoder."""

    error: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: list[tuple[str, list[float]]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def image_request(number: int) -> dict[str, Any]:
    """A question about a picture of stripes that no other request has."""
    rng = np.random.default_rng(number)
    height, width = (28 * n for n in rng.integers(2, 9, 2))
    colours = rng.integers(0, 256, (2, 3))
    stripe = (np.arange(width) // (4 + number % 9) + np.arange(height)[:, None] // (3 + number % 7)) % 2
    out = io.BytesIO()
    Image.fromarray(colours[stripe].astype(np.uint8)).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return _chat([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"picture {number}?"}])


def long_request(number: int, tokens: int) -> dict[str, Any]:
    """A prompt of about so many characters, which are tokens to a tokenizer of bytes; no two sentences alike."""
    first = 1000 * (number + 1)
    lines = [f"Box {n} holds {n * n % 97} grey stones and {n * 31 % 89} red ones. " for n in range(first, first + 1000)]
    return _chat("".join(lines)[:tokens])


def _chat(content: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }


def ask(port: int, body: dict[str, Any]) -> Answer:
    answer, began = Answer(), time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1200)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        found = json.loads(response.read())
        if response.status != 200:
            answer.error = f"{response.status}: {found['error']['message']}"
            return answer
        told = found["choices"][0]["logprobs"]["content"]
        answer.tokens = [(t["token"], [top["logprob"] for top in t["top_logprobs"][:2]]) for t in told]
        answer.prompt_tokens = found["usage"]["prompt_tokens"]
        answer.calls = found.get("vitstripe", {}).get("vit_calls", [])
    except OSError as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.seconds = time.perf_counter() - began
        connection.close()
    return answer


def differs(alone: Answer, together: Answer) -> str:
    """ "" for the same answer, "tie" where two tokens were as good as equal, else what is wrong."""
    for at, (own, other) in enumerate(zip(alone.tokens, together.tokens, strict=False)):
        if own[0] != other[0]:
            best, second = own[1]
            return "tie" if best - second <= NEAR else f"token {at} is {other[0]!r}, alone it is {own[0]!r}"
    return "" if len(alone.tokens) == len(together.tokens) else "another number of tokens"


def unfit(folder: Path) -> str:
    """Why the folder holds no model for this, or ""."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{folder} is no checkpoint: {error}"
    if "vision_config" not in config:
        return f"{folder} has no vision tower (its config.json has no vision_config); --model asks about images"
    return ""


@contextmanager
def started(console: Console, model: str, tp: int, sizes: Sizes) -> Iterator[ServerProcess]:
    room = -(-(sizes.prompt_tokens + 256) // 64) * 64
    seqs = sizes.images + sizes.prompts
    flags = ["--model", model, "--tp", str(tp), "--max-model-len", str(room), "--max-seqs", str(seqs)]
    flags += ["--mm-batching", "always", "--mm-process-config", '{"image": {"max_image_tokens": 64}}']
    console.print(f"\n[bold]$ python -m serving {shlex.join(flags)}[/bold]", soft_wrap=True)
    with serving(flags, None, READY_SECONDS) as server:
        yield server


def both_halves(console: Console, model: str, tp: int, sizes: Sizes) -> list[str]:
    """Runs the burst on tp devices and every request alone on one, prints what came of it; returns what is wrong."""
    if problem := unfit(Path(model)):
        return [problem]
    bodies = [long_request(i, sizes.prompt_tokens) for i in range(sizes.prompts)]
    bodies += [image_request(i) for i in range(sizes.images)]
    with started(console, model, tp, sizes) as server, ThreadPoolExecutor(len(bodies)) as pool:
        console.print(
            f"{sizes.prompts} long prompts at once, and {sizes.images} images as soon as they run", style="bold"
        )
        jobs = [pool.submit(ask, server.port, body) for body in bodies[: sizes.prompts]]
        # The images come while the long prompts are computed.
        deadline = time.monotonic() + 60
        while server.metrics().get("num_requests_running", 0) < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        jobs += [pool.submit(ask, server.port, body) for body in bodies[sizes.prompts :]]
        together = [job.result() for job in jobs]
        counts = server.metrics()
    with started(console, model, 1, sizes) as server:
        console.print(f"the same {len(bodies)} requests, one after another", style="bold")
        alone = [ask(server.port, body) for body in bodies]
    return judge(console, tp, sizes, together, alone, counts)


def judge(
    console: Console, tp: int, sizes: Sizes, together: list[Answer], alone: list[Answer], counts: dict[str, float]
) -> list[str]:
    """Prints the table; returns what is wrong."""
    verdicts = [differs(a, b) for a, b in zip(alone, together, strict=True)]
    ties, wrong = verdicts.count("tie"), [v for v in verdicts if v not in ("", "tie")]
    calls, lanes = counts["vit_calls_total"], counts["vit_lanes_filled_sum"]
    striped, replicated = (counts.get(f'indexer_rows_total{{path="{path}"}}', 0) for path in ("striped", "replicated"))
    # Only models with an indexer count rows.
    rows = f"{striped:.0f} of {striped + replicated:.0f}" if striped + replicated else "none: this model has no indexer"
    compiles = counts['compiles_total{stage="after_ready"}']
    long, images = together[: sizes.prompts], together[sizes.prompts :]
    title = f"{sizes.images} images beside {sizes.prompts} long prompts, {tp} devices"
    facts = Table(show_header=False, box=None, padding=(0, 2), title=title)
    for name, value in (
        ("long prompts", f"{min(a.prompt_tokens for a in long)} tokens and more"),
        ("seconds, long / images", f"{max(a.seconds for a in long):.1f} / {max(a.seconds for a in images):.1f}"),
        ("vision calls", f"{calls:.0f} for {len(images)} images, {lanes / max(calls, 1):.2f} of {tp} lanes filled"),
        ("indexer rows striped", rows),
        ("as alone on one device", f"{verdicts.count('')} of {len(verdicts)}, {ties} more part at a tie"),
        ("compiles after ready", f"{compiles:.0f}"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    problems = [answer.error for answer in (*together, *alone) if answer.error] + wrong
    if calls >= len(images):
        problems.append(f"{calls:.0f} vision calls for {len(images)} images: nothing was batched across requests")
    if lanes <= calls and tp > 1:
        problems.append(f"no vision call filled more than one of {tp} lanes")
    if replicated and not striped and tp > 1:
        problems.append(f"none of {replicated:.0f} indexer rows went the striped way")
    if compiles:
        problems.append(f"{compiles:.0f} programs were compiled after ready")
    return problems
