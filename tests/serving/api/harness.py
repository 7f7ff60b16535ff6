"""An engine without a model, and ways to talk to the app with and without a socket."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL import Image
from starlette.applications import Starlette

from serving.api import Limits, create_app
from serving.chat import ChatTemplate
from serving.metrics import Metrics
from serving.protocol import Event, FinishEvent, Health, Submission, TokenEvent, Usage
from serving.tokenizer import Tokenizer
from tests.helpers import GOLDENS
from vitbatch.images import ImageProcessor

CHECKPOINT = GOLDENS / "qwen3_vl"
TEXT_CHECKPOINT = GOLDENS / "glm_moe_dsa"
TOKENIZER = Tokenizer.from_checkpoint(CHECKPOINT)
TEMPLATE = ChatTemplate.from_checkpoint(CHECKPOINT)
PROCESSOR = ImageProcessor(patch_size=16, merge_size=2, min_pixels=4096, max_pixels=65536)
IMAGE_ID = 261
EOS_ID = 258
[LETTER_A] = TOKENIZER.encode_plain("a")


@dataclass
class FakeEngine:
    """Answers every request with `answer` (bytes are token ids of the byte-level tokenizer) from a thread of its own.

    `script` replaces the whole run of a request: it is called in the thread with the submission, a function that sends
    an event and an event that is set by an abort.
    """

    answer: str = "hello"
    script: Callable[[Submission, Callable[[Event], None], threading.Event], None] | None = None
    refuse: Exception | None = None
    state: str = "ready"
    heartbeat_age: float = 0.0
    max_model_len: int = 512
    model_name: str = "tiny/qwen3-vl"
    eos_ids: frozenset[int] = frozenset({EOS_ID})
    submissions: list[Submission] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: dict[str, threading.Event] = field(default_factory=dict)

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.submissions.append(submission)
        stopped = self.running[submission.request_id] = threading.Event()
        threading.Thread(target=self._run, args=(submission, on_event, stopped), daemon=True).start()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self.running:
            self.running[request_id].set()

    def health(self) -> Health:
        return Health(self.state, self.heartbeat_age, "as the test says")  # pyright: ignore[reportArgumentType]

    def _run(self, submission: Submission, send: Callable[[Event], None], stopped: threading.Event) -> None:
        if self.script is not None:
            self.script(submission, send, stopped)
        else:
            ids = TOKENIZER.encode_plain(self.answer)[: submission.params.max_tokens]
            for token_id in ids:
                send(TokenEvent(token_id))
            if len(ids) < submission.params.max_tokens:
                send(TokenEvent(EOS_ID))
                send(finish(submission, "stop", len(ids) + 1))
            else:
                send(finish(submission, "length", len(ids)))
        self.running.pop(submission.request_id, None)


def finish(submission: Submission, reason: Any, completion_tokens: int) -> FinishEvent:
    image_tokens = sum(span.image.num_tokens for span in submission.images)
    usage = Usage(len(submission.prompt_ids), completion_tokens, image_tokens, cached_tokens=3)
    return FinishEvent(reason, usage, (7,) if submission.images else ())


def until_aborted(submission: Submission, send: Callable[[Event], None], stopped: threading.Event) -> None:
    """A script: one token a millisecond until an abort."""
    tokens = 0
    while not stopped.wait(0.001):
        assert tokens < 5000, "nobody aborted the request"
        send(TokenEvent(LETTER_A))
        tokens += 1
    send(finish(submission, "abort", tokens))


def silent(submission: Submission, send: Callable[[Event], None], stopped: threading.Event) -> None:
    """A script: nothing until an abort, as in a long prefill."""
    stopped.wait(20)


def app_of(
    engine: FakeEngine, *, limits: Limits | None = None, metrics: Metrics | None = None, **other: Any
) -> Starlette:
    arguments = {"tokenizer": TOKENIZER, "template": TEMPLATE, "processor": PROCESSOR} | other
    return create_app(engine, limits=limits or Limits(), metrics=metrics or Metrics(), **arguments)


def call(app: Starlette, method: str, path: str, **request: Any) -> httpx.Response:
    """One request without a socket. An exception of the app fails the test."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


def chat(app: Starlette, messages: Any = "hi", **fields: Any) -> httpx.Response:
    """A chat of one user message (a string or parts), or of a list of messages."""
    is_list = isinstance(messages, list) and all("role" in message for message in messages)
    turns = messages if is_list else [{"role": "user", "content": messages}]
    return call(app, "POST", "/v1/chat/completions", json={"messages": turns} | fields)


def complete(app: Starlette, prompt: Any = "hi", **fields: Any) -> httpx.Response:
    return call(app, "POST", "/v1/completions", json={"prompt": prompt} | fields)


def chunks(response: httpx.Response) -> list[Any]:
    """The events of a stream; `[DONE]` stays a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    datas = [event.removeprefix("data: ") for event in events]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def text_of(events: Sequence[Any]) -> str:
    """The concatenated text of a stream's chunks."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, its shape checked."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def encoded_image(
    width: int = 100, height: int = 80, kind: str = "PNG", colour: tuple[int, int, int] = (9, 99, 199)
) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, kind)
    return buffer.getvalue()


def data_uri(encoded: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(encoded).decode()}"


def image_part(encoded: bytes | None = None) -> dict[str, Any]:
    uri = data_uri(encoded_image() if encoded is None else encoded)
    return {"type": "image_url", "image_url": {"url": uri}}


class Connection:
    """An ASGI connection whose client can go away at any moment."""

    def __init__(self, app: Starlette, path: str, body: dict[str, Any]):
        self.sent: list[dict[str, Any]] = []
        self._gone = asyncio.Event()
        self._raw = json.dumps(body).encode()
        self._read = False
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "server": ("server", 80),
            "client": ("client", 1),
            "root_path": "",
        }
        self.served = asyncio.ensure_future(app(scope, self._receive, self._send))  # pyright: ignore

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._raw, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(dict(message))


async def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
