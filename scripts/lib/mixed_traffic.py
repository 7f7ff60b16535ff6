"""Requests of every kind, and how each of them ended."""

import asyncio
import base64
import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DIGITS = sorted((ROOT / "serving" / "assets" / "digits").glob("*.png"))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_PATIENCE = 120  # times a refused request comes back


@dataclass(frozen=True)
class Job:
    """One request. answer: what a right model says, where that is known. leave_after: seconds until its client is gone.
    bad: the server must refuse it."""

    kind: str
    path: str
    body: dict[str, Any]
    answer: str | None = None
    leave_after: float | None = None
    bad: bool = False


@dataclass
class Tally:
    """ends: how requests ended, exactly one entry a request. busy: refusals that were tried again. problems: what must
    not happen, the first few of each in words."""

    ends: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    tokens: int = 0
    right: int = 0
    wrong: int = 0
    problems: Counter[str] = field(default_factory=Counter)


def data_uri(raw: bytes, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"}}


class Mix:
    """Draws jobs. aborts, bad: shares of all requests. most_answers: the largest n."""

    def __init__(self, seed: int, *, aborts: float = 0.1, bad: float = 0.05, most_answers: int = 4):
        self._draw = np.random.default_rng(seed)
        self._aborts, self._bad, self._most = aborts, bad, most_answers
        self._digits = [(path.name.split("_")[1], path.read_bytes()) for path in DIGITS]
        # Texts come again: of those that never do, each tokenizer of the server keeps 10 000, which took 75 000
        # requests and some 50 MiB. That would look like a leak.
        lengths = self._draw.integers(4, 100, 400)
        self._texts = [bytes(self._draw.integers(97, 123, n).tolist()).decode() for n in lengths]

    def job(self) -> Job:
        draw = self._draw
        kind = draw.choice(["completion", "chat", "digit", "pictures"], p=[0.2, 0.2, 0.35, 0.25])
        body: dict[str, Any] = {
            "max_tokens": int(draw.integers(1, 25)),
            "temperature": float(draw.choice([0.0, 0.7, 1.0])),
            "stream": bool(draw.random() < 0.5),
            "seed": int(draw.integers(1 << 30)),
            "ignore_eos": bool(draw.random() < 0.3),
        }
        if draw.random() < 0.2:
            body["n"] = int(draw.integers(1, self._most + 1))
        if draw.random() < 0.2:
            body["stop"] = ["7", "zz"]
        answer = None
        if kind == "completion":
            body["prompt"] = self._text()
        elif kind == "chat":
            body["messages"] = [{"role": "user", "content": self._text()}]
        elif kind == "digit":
            answer, raw = self._digits[int(draw.integers(len(self._digits)))]
            body = {"max_tokens": 4, "temperature": 0, "stream": body["stream"]}
            body["messages"] = _says(data_uri(raw), "digit?")
        else:
            count = int(draw.integers(1, 4))
            body["messages"] = _says(*[data_uri(self._picture()) for _ in range(count)], "what?")
        if draw.random() < self._bad:
            return Job("bad image", CHAT, body | {"messages": _says(data_uri(self._broken()), "digit?")}, bad=True)
        leave = float(draw.exponential(0.15)) if draw.random() < self._aborts else None
        return Job(str(kind), TEXT if kind == "completion" else CHAT, body, answer, leave)

    def _text(self) -> str:
        return self._texts[int(self._draw.integers(len(self._texts)))]

    def _picture(self) -> bytes:
        w, h = (int(side) for side in self._draw.integers(8, 100, 2))
        pixels = np.broadcast_to(self._draw.integers(0, 256, 3, dtype=np.uint8), (h, w, 3))
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
        return buffer.getvalue()

    def _broken(self) -> bytes:
        """Cut off, of another kind, of noise, or with a header that claims too much."""
        whole = self._digits[0][1]
        choices: list[Callable[[], bytes]] = [
            lambda: whole[: len(whole) // 2],
            lambda: b"<svg/>",
            lambda: self._draw.bytes(500),
            lambda: b"",
            lambda: whole[:16] + b"\x00\x00\xff\xff" * 2 + whole[24:],
        ]
        return choices[int(self._draw.integers(len(choices)))]()


def _says(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


class Clients:
    """Sends jobs and counts their ends. stopping: set once the server was told to end; refusals are final then."""

    def __init__(self, url: str, tally: Tally, transport: httpx.AsyncBaseTransport | None = None):
        self.tally, self.stopping = tally, False
        # An idle connection may be closed by the server at any time, so none is kept longer than the server would.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=1.0)
        self._client = httpx.AsyncClient(base_url=url, limits=limits, timeout=120, transport=transport)

    async def close(self) -> None:
        await self._client.aclose()

    async def run(self, job: Job) -> None:
        """One request to its end, coming back as long as the server says that it is busy."""
        end = "gave up: always busy"
        for _ in range(_PATIENCE):
            found = await self._once(job)
            if isinstance(found, str):
                end = found
                break
            self.tally.busy += 1
            await asyncio.sleep(found)
        self.tally.kinds[job.kind] += 1
        self.tally.ends[end] += 1

    async def _once(self, job: Job) -> str | float:
        """How it ended, or the seconds after which to try again."""
        try:
            async with asyncio.timeout(job.leave_after):
                return await (self._stream(job) if job.body.get("stream") else self._whole(job))
        except TimeoutError:
            return "client left"
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
            if self.stopping and not isinstance(error, httpx.ReadError):
                return "not taken: the server had stopped"
            return self._problem(f"connection lost: {type(error).__name__}")
        except httpx.TimeoutException:
            return self._problem("no answer within 120 s")

    async def _whole(self, job: Job) -> str | float:
        response = await self._client.post(job.path, json=job.body)
        if response.status_code != 200:
            return self._refusal(response.status_code, response.headers, job)
        body = response.json()
        texts = [c["text"] if "text" in c else c["message"]["content"] or "" for c in body["choices"]]
        reasons = {index: choice["finish_reason"] for index, choice in enumerate(body["choices"])}
        return self._answered(job, reasons, texts, body["usage"])

    async def _stream(self, job: Job) -> str | float:
        reasons: dict[int, str] = {}
        texts: dict[int, str] = {}
        usage, done = None, 0
        body = job.body | {"stream_options": {"include_usage": True}}
        async with self._client.stream("POST", job.path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refusal(response.status_code, response.headers, job)
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data.startswith(":"):
                    continue
                if data == "[DONE]":
                    done += 1
                    continue
                event = json.loads(data)
                if "error" in event:
                    return (
                        "error event" if self.stopping else self._problem(f"error event: {event['error']['message']}")
                    )
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    index = choice["index"]
                    piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    texts[index] = texts.get(index, "") + piece
                    if choice["finish_reason"]:
                        if index in reasons:
                            self._problem("a choice ended twice")
                        reasons[index] = choice["finish_reason"]
        if done != 1:
            return self._problem(f"a stream with {done} [DONE] lines")
        return self._answered(job, reasons, [texts[k] for k in sorted(texts)], usage)

    def _answered(self, job: Job, reasons: dict[int, str], texts: list[str], usage: dict[str, Any] | None) -> str:
        wanted = job.body.get("n", 1)
        if job.bad:
            return self._problem("a bad image was answered")
        if sorted(reasons) != list(range(wanted)) or not set(reasons.values()) <= {"stop", "length"}:
            return self._problem(f"{wanted} choices were asked for, and ended as {reasons}")
        if not usage or usage["completion_tokens"] < wanted:
            return self._problem(f"an answer without tokens: {usage}")
        self.tally.tokens += usage["completion_tokens"]
        if job.answer is not None:
            is_right = texts == [job.answer]
            self.tally.right += is_right
            self.tally.wrong += not is_right
        return "answered"

    def _refusal(self, status: int, headers: httpx.Headers, job: Job) -> str | float:
        if status == 400 and job.bad:
            return "refused: bad image"
        if status not in (429, 503):
            return self._problem(f"status {status} for {job.kind}")
        if self.stopping:
            return "refused: the server was stopping"
        wait = headers.get("retry-after", "")
        if not wait.isdecimal() or int(wait) < 1:
            return self._problem(f"status {status} with Retry-After {wait!r}")
        return float(wait)

    def _problem(self, text: str) -> str:
        self.tally.problems[text] += 1
        return "LOST"
