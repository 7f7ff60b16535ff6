"""What a request may cost: every limit is checked before the engine hears of the request."""

import asyncio
import gc
import io
import json
import logging
import math
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.api import Limits
from serving.api.intake import Workers
from serving.api.listen import server_config
from serving.metrics import Metrics
from tests.serving.api.harness import (
    PROCESSOR,
    Connection,
    FakeEngine,
    app_of,
    call,
    chat,
    encoded_image,
    error_of,
    eventually,
    image_part,
    silent,
    until_aborted,
)
from tests.vitbatch.hostile import png
from tests.vitbatch.pictures import encoded, noise
from vitbatch.images.patches import Spread, one_by_one

SMALL = Limits(max_image_pixels=100_000, max_request_pixels=150_000)


class Untouched:
    """A processor that no image of the test may reach."""

    def prepare(self, image: bytes, spread: Spread) -> Any:
        raise AssertionError("the image was prepared")


def refused(content: list[Any], status: int = 400, **app: Any) -> str:
    """The error's text; the engine heard nothing."""
    engine = FakeEngine()
    response = chat(app_of(engine, **app), content)
    assert response.status_code == status
    assert engine.submissions == []
    return error_of(response)["message"]


def test_pixels_are_counted_from_the_header_of_each_image():
    text = refused([image_part(png(400, 251))], limits=SMALL, processor=Untouched())
    assert text == "image of 400x251 px has 100400 pixels; the limit is 100000: send a smaller image"


def test_pixels_are_counted_over_all_images_before_any_is_decoded():
    parts = [image_part(png(300, 200)), image_part(png(300, 200)), image_part(png(300, 101))]
    text = refused(parts, limits=SMALL, processor=Untouched())
    assert text == ("the images have 150300 pixels together; the limit is 150000: send fewer or smaller images")
    engine = FakeEngine()
    parts = [image_part(encoded_image(300, 200))] * 2 + [image_part(encoded_image(300, 100))]
    assert chat(app_of(engine, limits=SMALL), parts).status_code == 200


def test_forty_bombs_at_once_are_forty_answers_and_none_is_in_the_log(caplog):
    bomb = image_part(png(12000, 12000, bytes(12000 * 1501)))

    async def run() -> list[Connection]:
        app = app_of(FakeEngine(), processor=Untouched())
        content = {"messages": [{"role": "user", "content": [bomb]}]}
        connections = [Connection(app, "/v1/chat/completions", content) for _ in range(40)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(connection.served for connection in connections))
        return connections

    with caplog.at_level(logging.DEBUG):
        assert [connection.sent[0]["status"] for connection in asyncio.run(run())] == [400] * 40
    assert "base64" not in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 500


@pytest.mark.parametrize(("size", "ratio"), [((10000, 1), 10000), ((3, 900), 300), ((201, 1), 201)])
def test_an_image_that_is_too_narrow_is_told_its_ratio(size, ratio):
    text = refused([image_part(encoded_image(*size))])
    assert f"image of {size[0]}x{size[1]} px: aspect ratio {ratio} is" in text


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (26, 28), (500, 19), (16, 16), (200, 1)])
def test_an_image_smaller_than_a_token_is_brought_up_to_one(size):
    engine = FakeEngine()
    assert chat(app_of(engine), [image_part(encoded_image(*size))]).status_code == 200
    [span] = engine.submissions[0].images
    assert span.image.num_tokens >= 1
    assert engine.submissions[0].prompt_ids.count(261) == span.image.num_tokens


def test_images_count_with_their_tokens_before_the_request_is_queued():
    large = image_part(encoded_image(256, 256))  # 64 tokens
    engine = FakeEngine(max_model_len=150)
    assert chat(app_of(engine), [large]).status_code == 200
    assert len(engine.submissions) == 1
    over = chat(app_of(engine), [large] * 3)
    assert over.status_code == 400
    assert "(192 of them from images)" in error_of(over)["message"]
    assert error_of(over)["code"] == "context_length_exceeded"
    assert len(engine.submissions) == 1


def test_more_images_or_bytes_than_allowed_are_refused_undecoded():
    assert "9 images in one request: the limit is 8" in refused([image_part()] * 9, processor=Untouched())
    text = refused([image_part(bytes(1001))], processor=Untouched(), limits=Limits(max_image_bytes=1000))
    assert text.startswith("image of 1001 bytes: the limit is 1000")


def test_of_an_animation_only_the_first_frame_is_read():
    frames = [Image.new("RGB", (64, 64), (n, 2 * n, 99)) for n in range(100)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    first = encoded_image(64, 64, "GIF", (0, 0, 99))
    engine = FakeEngine()
    assert chat(app_of(engine), [image_part(buffer.getvalue()), image_part(first)]).status_code == 200
    animated, still = (span.image for span in engine.submissions[0].images)
    assert animated.key == still.key


@pytest.mark.parametrize("fault", [MemoryError(), SystemExit(3), StopIteration(), RecursionError(), OSError("disk")])
def test_a_decoder_that_fails_in_any_way_costs_one_request(fault, caplog):
    class Failing:
        def prepare(self, image: bytes, spread: Spread) -> Any:
            raise fault

    engine = FakeEngine()
    response = chat(app_of(engine, processor=Failing()), [image_part()])
    assert response.status_code == 500
    assert "disk" not in response.text
    assert type(fault).__name__ in caplog.text
    assert engine.submissions == []


def test_a_decoder_that_fails_for_one_image_leaves_the_others_alone():
    bad = encoded_image(colour=(255, 0, 0))

    class Moody:
        def prepare(self, image: bytes, spread: Spread) -> Any:
            if image == bad:
                raise SystemExit(1)
            return PROCESSOR.prepare(image, spread=spread)

    async def run() -> list[int]:
        app = app_of(FakeEngine(), processor=Moody())
        connections = [
            Connection(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": [image_part(image)]}]})
            for image in [bad, encoded_image()] * 10
        ]
        async with asyncio.timeout(20):
            await asyncio.gather(*(connection.served for connection in connections))
        return [connection.sent[0]["status"] for connection in connections]

    assert asyncio.run(run()) == [500, 200] * 10


def test_images_are_decoded_by_every_core_up_to_sixteen(monkeypatch):
    for cores, threads in ((1, 1), (5, 5), (16, 16), (96, 16)):
        monkeypatch.setattr("serving.api.limits.usable_cores", lambda cores=cores: cores)
        assert Limits().image_workers == threads
    assert Limits(image_workers=3).image_workers == 3


def test_pixels_that_are_decoded_at_one_time_are_bounded_and_everybody_has_a_turn():
    """With a thread each for all of them; the large one alone is over the limit, and waits for room to be alone."""
    lock, together, most = threading.Lock(), [0], [0]

    class Watched:
        def prepare(self, image: bytes, spread: Spread) -> Any:
            pixels = math.prod(Image.open(io.BytesIO(image)).size)
            with lock:
                together[0] += pixels
                most[0] = max(most[0], together[0])
                assert pixels == 40_000 or together[0] <= 25_000, together
            time.sleep(0.01)
            with lock:
                together[0] -= pixels
            return PROCESSOR.prepare(image, spread=spread)

    async def run() -> list[int]:
        app = app_of(FakeEngine(), processor=Watched(), limits=Limits(image_workers=12, max_decoding_pixels=25_000))
        sizes = [(100, 100), (200, 50), (200, 200), (30, 30)] * 6
        contents = [[image_part(encoded_image(*size))] for size in sizes]
        connections = [
            Connection(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
            for content in contents
        ]
        async with asyncio.timeout(20):
            await asyncio.gather(*(connection.served for connection in connections))
        return [connection.sent[0]["status"] for connection in connections]

    assert asyncio.run(run()) == [200] * 24
    assert most == [40_000], "the large one had company"


def test_a_picture_is_prepared_by_threads_together_and_comes_out_the_same():
    photograph = encoded(Image.fromarray(noise(2100, 1700, 0)), "PNG")
    bands: list[int] = []

    class Watched:
        def prepare(self, image: bytes, spread: Spread) -> Any:
            def told(work: Any, items: Any) -> Any:
                bands.append(len(items))
                return spread(work, items)

            return PROCESSOR.prepare(image, spread=told)

    engine = FakeEngine()
    app = app_of(engine, processor=Watched(), limits=Limits(image_workers=3))
    assert chat(app, [image_part(photograph)]).status_code == 200
    [span] = engine.submissions[0].images
    plain = PROCESSOR.prepare(photograph, spread=one_by_one)
    assert span.image.key == plain.key
    assert (span.image.patches == plain.patches).all()
    assert max(bands) > 3


def test_requests_that_are_being_prepared_are_counted():
    async def run() -> None:
        app = app_of(FakeEngine(), limits=Limits(max_preparing=2))
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": [image_part()]}]}
        connections = [Connection(app, path, body) for _ in range(4)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(connection.served for connection in connections))
        statuses = [connection.sent[0]["status"] for connection in connections]
        assert statuses[:2] == [200, 200]
        assert statuses[2:] == [429, 429]
        assert b"retry-after" in dict(connections[3].sent[0]["headers"])
        again = Connection(app, path, body)
        await again.served
        assert again.sent[0]["status"] == 200

    asyncio.run(run())


@pytest.mark.parametrize("value", [b"[]", b"{}", b'"a"', b'{"a":"b"}', b"1.5", b"true"], ids=bytes.decode)
def test_a_body_of_more_values_than_allowed_is_not_parsed(value: bytes):
    """A byte of JSON may be twenty of objects."""
    engine, limits = FakeEngine(), Limits(max_body_values=50)
    app = app_of(engine, limits=limits)

    def send(count: int) -> Any:
        body = b'{"messages": [{"role": "user", "content": "hi"}], "metadata": [' + b",".join([value] * count) + b"]}"
        return call(app, "POST", "/v1/chat/completions", content=body, headers={"content-type": "application/json"})

    assert send(5).status_code == 200
    response = send(51)
    assert response.status_code == 400
    assert "commas, quotes and brackets: the limit is 50; send less" in error_of(response)["message"]
    assert len(engine.submissions) == 1


def test_what_a_client_sent_is_not_kept_after_it_left():
    """Its work may still wait for a thread that others keep busy."""

    class Body:
        pass

    async def run() -> None:
        workers, busy, release = Workers(1, "test"), threading.Event(), threading.Event()
        first = asyncio.ensure_future(workers.run(lambda: (busy.set(), release.wait(20))))
        await eventually(busy.is_set)
        body = Body()
        kept = weakref.ref(body)
        waiting = asyncio.ensure_future(workers.run(id, body))
        await asyncio.sleep(0)
        del body
        assert kept() is not None
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        del waiting
        gc.collect()
        assert kept() is None
        release.set()
        await first
        workers.shutdown()

    asyncio.run(run())


def test_log_probabilities_of_echoed_prompts_are_counted_over_all_answers():
    """A prompt of a few kilobytes could ask for gigabytes of them."""
    engine = FakeEngine(max_model_len=100)
    app = app_of(engine, limits=Limits(max_echo_logprobs=240))
    asks = {"prompt": ["abcde", "fghij"], "max_tokens": 1, "echo": True, "logprobs": 3}
    response = call(app, "POST", "/v1/completions", json=asks | {"n": 7})
    assert (response.status_code, error_of(response)["param"]) == (400, "logprobs")
    assert "280 log-probabilities of 10 prompt tokens: the limit is 240" in error_of(response)["message"]
    assert engine.submissions == []
    for fewer in ({"n": 6}, {"n": 7, "logprobs": 2}, {"n": 8, "echo": False}, {"n": 8, "logprobs": None}):
        assert call(app, "POST", "/v1/completions", json=asks | fewer).status_code == 200


# On a socket


@asynccontextmanager
async def served(app: Starlette, limits: Limits) -> AsyncIterator[int]:
    """The app behind the bounded listener; its port. The system keeps little of what is on its way to clients."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(server_config(app, limits))
        running = asyncio.create_task(server.serve([listener]))
        await eventually(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        await running


async def exchange(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEALTH = b"GET /health HTTP/1.1\r\nHost: server\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "head",
    [
        HEALTH + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
        HEALTH + b"".join(b"X-%d: a\r\n" % n for n in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: server\r\n\r\n",
    ],
    ids=["one long header", "many headers", "a long path"],
)
def test_a_head_over_the_limit_is_refused(head):
    async def run() -> None:
        limits, metrics = Limits(), Metrics()
        async with served(app_of(FakeEngine(), limits=limits, metrics=metrics), limits) as port:
            # The connection is closed with some of the head unread, and then a client may not see the 400.
            assert (await exchange(port, head))[:12] in (b"", b"HTTP/1.1 400")
            assert b"http_responses_total{" not in metrics.render(), "the app never saw the request"
            assert (await exchange(port, HEALTH + b"X-Long: " + b"a" * 50_000 + b"\r\n\r\n")).startswith(
                b"HTTP/1.1 200"
            )

    asyncio.run(run())


@pytest.mark.parametrize("pieces", [(), (b"GET /health",), tuple(HEALTH[k : k + 1] for k in range(len(HEALTH)))])
def test_a_client_that_never_finishes_its_head_is_cut_off(pieces):
    async def run() -> None:
        limits = replace(Limits(), header_seconds=0.2)
        async with served(app_of(FakeEngine(), limits=limits), limits) as port:
            assert await exchange(port, *pieces, pause=0.005) == b""
            # The clock is the head's alone, and a later request on the connection has its own.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                await asyncio.sleep(0.15)
                writer.write(b"GET /health HTTP/1.1\r\nHost: server\r\n\r\n")
                assert b"200" in await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}")
            writer.close()

    asyncio.run(run())


def test_a_body_that_does_not_come_is_a_408():
    async def run() -> None:
        limits = replace(Limits(), body_seconds=0.2)
        async with served(app_of(FakeEngine(), limits=limits), limits) as port:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
            answer = await exchange(port, head + b"Content-Length: 50\r\nConnection: close\r\n\r\n{")
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"the body did not come within 0.2 s" in answer
            assert (await exchange(port, HEALTH + b"\r\n")).startswith(b"HTTP/1.1 200")

    asyncio.run(run())


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: s\r\nContent-Length: 9999\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: s\r\nContent-Type: text/plain\r\nContent-Length: 9999\r\n\r\n",
    ],
    ids=["no body wanted", "body of another type"],
)
def test_a_body_that_was_answered_already_does_not_hold_its_connection(head):
    async def run() -> None:
        limits = replace(Limits(), header_seconds=0.2)
        async with served(app_of(FakeEngine(), limits=limits), limits) as port:
            answer = await exchange(port, head, *[b"x"] * 60, pause=0.01)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")  # bytes that came after the close may reset it
            assert (await exchange(port, HEALTH + b"\r\n")).startswith(b"HTTP/1.1 200")

    async def sent() -> int:
        """Bytes of the body that the server took before it closed."""
        limits = replace(Limits(), header_seconds=0.2)
        async with served(app_of(FakeEngine(), limits=limits), limits) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            for count in range(1000):
                try:
                    writer.write(b"x")
                    await writer.drain()
                except ConnectionError:
                    return count
                await asyncio.sleep(0.01)
            writer.close()
            return 1000

    asyncio.run(run())
    assert asyncio.run(sent()) < 1000


@contextmanager
def narrow_client(port: int, request: bytes) -> Iterator[socket.socket]:
    """A client with little room for what it does not read, after its request."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(request)
        client.setblocking(False)
        yield client


def generation(**fields: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: s\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_client_that_never_reads_its_stream_is_ended_like_one_that_left(caplog):
    async def run() -> None:
        limits, metrics, engine = Limits(unread_seconds=0.3), Metrics(), FakeEngine(script=until_aborted)
        async with served(app_of(engine, limits=limits, metrics=metrics), limits) as port:
            with narrow_client(port, generation(stream=True)):
                await eventually(lambda: engine.aborted, 20)
                assert engine.aborted == [engine.submissions[0].request_id]
                await eventually(lambda: not engine.running)
                count = metrics.registry.get_sample_value
                assert count("vitstripe_request_finished_total", {"reason": "abort"}) == 1
            assert (await exchange(port, HEALTH + b"\r\n")).startswith(b"HTTP/1.1 200")

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    [told] = [record.getMessage() for record in caplog.records if "took nothing" in record.getMessage()]
    assert told.startswith("a client took nothing for 0.3 s while ")
    lines = [json.loads(record.message) for record in caplog.records if record.name == "serving.http"]
    assert [line["status"] for line in lines if line["route"] == "/v1/chat/completions"] == [499]


def large_answer(size: int) -> Starlette:
    async def answer(_: Request) -> Response:
        return Response(b"x" * size)

    return app_of(FakeEngine(), extra_routes=[Route("/large", answer)])


LARGE = b"GET /large HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n"


def test_a_whole_answer_that_nobody_reads_does_not_hold_its_connection(caplog):
    """It is over for the server, which waits for the client to take it before it closes."""

    async def run() -> None:
        async with served(large_answer(300_000), Limits(unread_seconds=0.2)) as port:
            with narrow_client(port, LARGE) as client:
                came, loop = 0, asyncio.get_running_loop()
                await eventually(lambda: "took nothing" in caplog.text, 20)
                async with asyncio.timeout(20):
                    while piece := await loop.sock_recv(client, 65536):
                        came += len(piece)
                assert 0 < came < 300_000

    asyncio.run(run())


def test_a_client_that_takes_a_little_now_and_then_gets_everything():
    """For longer than the limit, with bytes waiting for it all along."""

    async def run() -> None:
        size, began = 150_000, time.monotonic()
        async with served(large_answer(size), Limits(unread_seconds=2.0)) as port:
            with narrow_client(port, LARGE) as client:
                answer, loop = b"", asyncio.get_running_loop()
                while piece := await loop.sock_recv(client, 4096):
                    answer += piece
                    await asyncio.sleep(0.1)
            assert answer.endswith(b"x" * size)
            assert time.monotonic() - began > 3.5

    asyncio.run(run())


def test_requests_that_are_sent_without_waiting_are_answered_in_order():
    async def run() -> None:
        limits = Limits()
        async with served(app_of(FakeEngine("abc"), limits=limits), limits) as port:
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: s\r\nContent-Type: application/json\r\n"
            ask = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            health = b"GET /health HTTP/1.1\r\nHost: s\r\n\r\n"
            answer = await exchange(port, (ask + health) * 20 + HEALTH + b"\r\n")
            texts = answer.split(b"HTTP/1.1 200 OK")
            assert texts[0] == b""
            assert [b"chat.completion" in text for text in texts[1:]] == [True, False] * 20 + [False]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_has_left(stream: bool):
    async def run() -> None:
        limits, engine = Limits(), FakeEngine(script=silent)
        async with served(app_of(engine, limits=limits), limits) as port:
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: s\r\nContent-Type: application/json\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await eventually(lambda: engine.submissions)
            writer.write_eof()
            await eventually(lambda: engine.aborted)
            assert engine.aborted == [engine.submissions[0].request_id]
            assert await reader.read() == b""
            writer.close()

    asyncio.run(run())


def test_a_connection_is_never_made_another_protocol():
    """The keys are looked at for requests; a websocket would pass them by."""
    assert server_config(app_of(FakeEngine()), Limits()).ws == "none", "whatever else is installed"

    async def run() -> None:
        limits = Limits()
        async with served(app_of(FakeEngine(), limits=limits), limits) as port:
            for wanted in (b"websocket", b"h2c"):
                head = HEALTH.replace(b"Connection: close", b"Connection: Upgrade, close")
                key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
                answer = await exchange(port, head + b"Upgrade: " + wanted + b"\r\n" + key)
                assert answer.startswith(b"HTTP/1.1 200")

    asyncio.run(run())


def test_what_the_listener_says_goes_where_every_log_goes(caplog):
    async def run() -> None:
        async with served(app_of(FakeEngine()), Limits()) as port:
            with caplog.at_level(logging.WARNING):
                answer = await exchange(port, b"\x16\x03\x01\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 400")
                assert b"text/plain" in answer

    asyncio.run(run())
    assert "Invalid HTTP request received" in caplog.text


def test_a_word_of_the_clients_own_is_no_method_in_the_log(caplog):
    async def run() -> None:
        async with served(app_of(FakeEngine()), Limits()) as port:
            head = HEALTH.replace(b"GET /health", b"SECRET" * 500 + b" /v1/models")
            assert (await exchange(port, head + b"\r\n")).startswith(b"HTTP/1.1 405")

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "serving.http"]
    assert (line["method"], line["status"]) == ("other", 405)
    assert "SECRET" not in caplog.text
