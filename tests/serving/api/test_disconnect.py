"""Clients that leave, clients that are slow, and probes while images are prepared."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from PIL import Image
from starlette.applications import Starlette

from serving.api import Limits
from serving.api.listen import server_config
from serving.chat import ChatTemplate
from serving.metrics import Metrics
from tests.serving.api.harness import (
    PROCESSOR,
    TEMPLATE,
    Connection,
    FakeEngine,
    app_of,
    eventually,
    image_part,
    silent,
    text_of,
    until_aborted,
)
from tests.vitbatch.pictures import encoded, noise
from vitbatch.images.patches import Spread

CHAT = "/v1/chat/completions"


def body(stream: bool, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}], "stream": stream} | fields


async def settled(connection: Connection) -> None:
    async with asyncio.timeout(5):
        await connection.served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, until_aborted], ids=["before a token", "while decoding"])
def test_a_client_that_leaves_ends_its_request_in_the_engine(script, stream: bool):
    async def run() -> None:
        metrics = Metrics()
        engine = FakeEngine(script=script)
        connection = Connection(app_of(engine, metrics=metrics), CHAT, body(stream))
        await eventually(lambda: engine.submissions)
        if stream and script is until_aborted:
            await eventually(lambda: len(connection.sent) > 5)
        assert engine.aborted == []
        connection.leave()
        await settled(connection)
        assert engine.aborted == [engine.submissions[0].request_id]
        await eventually(lambda: not engine.running)
        count = metrics.registry.get_sample_value
        assert count("vitstripe_request_finished_total", {"reason": "abort"}) == 1
        assert count("vitstripe_http_responses_total", {"route": CHAT, "code": "499"}) == 1

    asyncio.run(run())


def test_a_client_that_leaves_while_its_images_are_prepared_never_reaches_the_engine():
    started, release = threading.Event(), threading.Event()

    class SlowProcessor:
        def prepare(self, image: bytes, spread: Spread):
            started.set()
            release.wait(5)
            return PROCESSOR.prepare(image, spread=spread)

    async def run() -> None:
        engine = FakeEngine()
        app = app_of(engine, processor=SlowProcessor())
        connection = Connection(app, CHAT, {"messages": [{"role": "user", "content": [image_part()] * 3}]})
        await eventually(started.is_set)
        connection.leave()
        await settled(connection)
        release.set()
        await asyncio.sleep(0.05)
        assert engine.submissions == []

    asyncio.run(run())


def test_a_request_that_ends_in_order_is_not_aborted():
    async def run() -> None:
        engine = FakeEngine()
        for stream in (False, True):
            connection = Connection(app_of(engine), CHAT, body(stream))
            await settled(connection)
            assert not connection.sent[-1].get("more_body", False)
        assert engine.aborted == []

    asyncio.run(run())


def test_probes_are_answered_while_images_are_prepared():
    release = threading.Event()
    running: list[int] = []

    class SlowProcessor:
        def prepare(self, image: bytes, spread: Spread):
            running.append(threading.get_ident())
            release.wait(10)
            return PROCESSOR.prepare(image, spread=spread)

    async def run() -> None:
        app = app_of(FakeEngine(), processor=SlowProcessor(), limits=Limits(image_workers=2))
        content = {"messages": [{"role": "user", "content": [image_part()]}]}
        connections = [Connection(app, CHAT, content) for _ in range(12)]
        await eventually(lambda: len(running) == 2)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.post(CHAT, json=body(False))).status_code == 200  # text does not wait for images
        assert len(running) == 2  # as many as there are workers, however many wait
        release.set()
        for connection in connections:
            await settled(connection)
            assert connection.sent[0]["status"] == 200
        assert len(set(running)) == 2

    asyncio.run(run())


def test_probes_are_answered_between_the_images_of_a_burst():
    """Real decoding and resizing: 64 requests of a photograph each."""
    done: list[int] = []
    probes: list[int] = []  # images that were done at each answer

    class Counting:
        def prepare(self, image: bytes, spread: Spread):
            prepared = PROCESSOR.prepare(image, spread=spread)
            done.append(1)
            return prepared

    async def run() -> None:
        app = app_of(FakeEngine(), processor=Counting(), limits=Limits(image_workers=2))
        photograph = Image.fromarray(noise(1200, 1600, 0))
        content = {"messages": [{"role": "user", "content": [image_part(encoded(photograph, "JPEG"))]}]}
        connections = [Connection(app, CHAT, content) for _ in range(64)]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            while not all(connection.served.done() for connection in connections):
                assert (await client.get("/health")).status_code == 200
                probes.append(len(done))
                await asyncio.sleep(0)
        assert all(connection.sent[0]["status"] == 200 for connection in connections)

    asyncio.run(run())
    assert len(done) == 64
    assert len(set(probes)) > 16, "the event loop was kept from its probes"


def test_probes_are_answered_while_a_prompt_is_rendered():
    started, release = threading.Event(), threading.Event()

    class SlowTemplate(ChatTemplate):
        def render(self, messages, **named):
            started.set()
            release.wait(10)
            return super().render(messages, **named)

    async def run() -> None:
        template = SlowTemplate.__new__(SlowTemplate)
        template.__dict__.update(TEMPLATE.__dict__)
        app = app_of(FakeEngine(), template=template)
        connection = Connection(app, CHAT, body(False))
        await eventually(started.is_set)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            assert (await client.get("/health")).status_code == 200
        assert connection.sent == []
        release.set()
        await settled(connection)
        assert connection.sent[0]["status"] == 200

    asyncio.run(run())


def test_bodies_that_are_being_prepared_are_bounded_together():
    release = threading.Event()

    class SlowProcessor:
        def prepare(self, image: bytes, spread: Spread):
            release.wait(10)
            return PROCESSOR.prepare(image, spread=spread)

    async def run() -> None:
        limits = Limits(max_body_bytes=6000, max_preparing_bytes=10_000)
        app = app_of(FakeEngine(), processor=SlowProcessor(), limits=limits)
        text = {"type": "text", "text": "x" * 3500}
        content = {"messages": [{"role": "user", "content": [image_part(), text]}], "temperature": 0}
        connections = [Connection(app, CHAT, content) for _ in range(4)]
        await eventually(lambda: any(connection.served.done() for connection in connections))
        refused = [connection for connection in connections if connection.served.done()]
        assert [connection.sent[0]["status"] for connection in refused] == [429] * len(refused)
        release.set()
        for connection in connections:
            await settled(connection)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            assert (await client.post(CHAT, json=body(False))).status_code == 200  # the room is free again

    asyncio.run(run())


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The app behind the server's own listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(server_config(app, Limits()))
        running = asyncio.create_task(server.serve([listener]))
        await eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await running


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_socket_ends_the_request_in_the_engine(stream: bool):
    async def run() -> None:
        engine = FakeEngine(script=until_aborted)
        async with served(app_of(engine)) as url:
            async with httpx.AsyncClient() as client:
                request = client.build_request("POST", url + CHAT, json=body(stream))
                if stream:
                    response = await client.send(request, stream=True)
                    await anext(response.aiter_bytes())
                    await response.aclose()
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        await client.post(url + CHAT, json=body(False), timeout=0.3)
            await eventually(lambda: engine.aborted)
            await eventually(lambda: not engine.running)
            assert engine.aborted == [engine.submissions[0].request_id]

    asyncio.run(run())


def test_many_slow_readers_all_get_everything():
    answer = "every word of it, to the end"

    async def read(client: httpx.AsyncClient, url: str) -> bytes:
        async with client.stream("POST", url + CHAT, json=body(True, max_tokens=400)) as response:
            assert response.status_code == 200
            parts = []
            async for part in response.aiter_raw(chunk_size=1024):
                parts.append(part)
                await asyncio.sleep(0.01)
            return b"".join(parts)

    async def run() -> None:
        engine = FakeEngine(answer)
        limits = httpx.Limits(max_connections=None)
        async with served(app_of(engine)) as url, httpx.AsyncClient(limits=limits, timeout=30) as client:
            streams = await asyncio.gather(*[read(client, url) for _ in range(256)])
        for stream in streams:
            *events, done, end = stream.split(b"\n\n")
            assert (done, end) == (b"data: [DONE]", b"")
            assert text_of([json.loads(event.removeprefix(b"data: ")) for event in events]) == answer
        assert engine.aborted == []

    asyncio.run(run())
