"""Clients of a server for benchmarks: one streaming request with the times of its tokens, and many at once."""

import base64
import http.client
import io
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
from PIL import Image

_MOST_PROCESSES = 8
WORDS = "abcdefghijklmnopqrstuvwxyz      "


@dataclass
class Reply:
    """What one request got. sent: when, on the clock of all; times: of each event with text, since then, seconds;
    tokens: how many had come with each, if the server was asked to count."""

    sent: float = 0.0
    status: int = 0
    error: str = ""
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return self.status == 200 and not self.error and bool(self.times)

    @property
    def ttft(self) -> float:
        return self.times[0] if self.times else float("nan")

    @property
    def tpot(self) -> float:
        """Seconds an output token after the first."""
        return (self.seconds - self.ttft) / max(self.usage.get("completion_tokens", 0) - 1, 1)


def text_of(length: int, seed: int) -> str:
    """Words nobody has sent before, so that no cache knows them; one byte, one token."""
    return "".join(np.random.default_rng(seed).choice(list(WORDS), length))


def image_of(size: int, seed: int) -> str:
    """A JPEG of size x size as a data URI, no two the same."""
    small = np.random.default_rng(seed).integers(0, 256, (max(size // 16, 1), max(size // 16, 1), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def chat(text: str, image: str | None, tokens: int, *, counted: bool = False) -> dict[str, Any]:
    """The body of a request that makes exactly `tokens` tokens; counted: each event says how many there are so far."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": counted},
    }


def ask(port: int, body: dict[str, Any], timeout: float = 600.0) -> Reply:
    reply, connection = Reply(), http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    payload = json.dumps(body)
    reply.sent = begin = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", payload, {"content-type": "application/json"})
        response = connection.getresponse()
        reply.status = response.status
        if response.status != 200:
            reply.error = response.read().decode(errors="replace")[:500]
            return reply
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                reply.error = str(event["error"])[:500]
                return reply
            reply.usage = event.get("usage") or reply.usage
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                reply.times.append(time.perf_counter() - begin)
                reply.tokens.append(reply.usage.get("completion_tokens", 0))
    except OSError as error:
        reply.error = f"{type(error).__name__}: {error}"
    finally:
        reply.seconds = time.perf_counter() - begin
        connection.close()
    return reply


def ask_all(port: int, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
    """All at once, from several processes where there are cores for them: the clients of one interpreter wait for each
    other, and would measure that."""
    processes = min(len(bodies), max(1, (os.cpu_count() or 1) // 4), _MOST_PROCESSES)
    if processes == 1:
        return _ask_together(port, bodies)
    shares = [bodies[i::processes] for i in range(processes)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, _wait_for_others, (spawn.Barrier(processes),)) as pool:
        replies = list(pool.map(_ask_together, [port] * processes, shares))
    return [replies[i % processes][i // processes] for i in range(len(bodies))]


def _wait_for_others(barrier: Barrier) -> None:
    """All processes are up before the first asks. A pool starts them one by one, as long as there are tasks."""
    barrier.wait(120)


def _ask_together(port: int, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(port, body), bodies))
