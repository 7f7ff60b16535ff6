"""Remote images: what reaches the remote side, what is refused, and what an error tells."""

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from serving.api import Limits
from serving.api.errors import ApiError
from serving.api.fetch import Fetcher
from serving.api.remote import ImageHosts, is_public
from serving.cli import UsageError, image_hosts, parser
from serving.metrics import Metrics
from tests.serving.api.harness import Connection, FakeEngine, app_of, encoded_image, eventually
from tests.serving.api.picture_server import CERTIFICATE, Names, PictureServer, fetcher, pictures, redirect, response

CHAT = "/v1/chat/completions"
PICTURE = encoded_image()


def lab(
    work: Callable[[PictureServer], Awaitable[Any]], answers: dict[str, Any] | None = None, *, tls: bool = False
) -> Any:
    """Runs `work` with a server of pictures."""

    async def run() -> Any:
        async with pictures({"/x.png": response(PICTURE)} | (answers or {}), tls=tls) as server:
            return await work(server)

    return asyncio.run(run())


async def refused(fetch: Awaitable[bytes]) -> ApiError:
    with pytest.raises(ApiError) as error:
        await fetch
    assert error.value.__cause__ is None
    assert error.value.param == "here"
    for leak in ("127.0.0.1", "::1", "10.0.0", "secret", "Errno"):
        assert leak not in error.value.message
    return error.value


def ask(app: Starlette, *urls: str) -> Awaitable[httpx.Response]:
    async def send() -> httpx.Response:
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})

    return send()


def test_nothing_is_fetched_until_hosts_are_named():
    async def work(server: PictureServer) -> None:
        for url in (server.url("/x.png"), "https://93.184.216.34/x", "HTTP://localhost/"):
            answer = await ask(app_of(FakeEngine()), url)
            assert answer.status_code == 400
            assert "remote images are off" in answer.json()["error"]["message"]
        assert server.heads == []

    lab(work)
    assert image_hosts(parser().parse_args(["--model", "demo"])) is None


def test_a_named_host_gives_the_image_that_a_data_uri_would():
    async def work(server: PictureServer) -> None:
        engine = FakeEngine()
        answer = await ask(app_of(engine, fetcher=fetcher(server)), server.url("/x.png"), server.url("/x.png"))
        assert answer.status_code == 200
        first, second = (span.image for span in engine.submissions[0].images)
        assert first.key == second.key, "one content, one key"
        assert len(server.heads) == 2, "nothing is kept by address"

    lab(work)


def test_the_request_says_who_is_meant_and_nothing_about_us():
    async def work(server: PictureServer) -> None:
        assert await fetcher(server).fetch(server.url("/x.png"), "here") == PICTURE
        [head] = server.heads
        assert head.startswith("GET /x.png HTTP/1.1\r\n")
        names = {line.split(":")[0].lower() for line in head.splitlines()[1:] if line}
        assert names == {"host", "accept", "accept-encoding", "user-agent", "connection"}
        assert f"Host: pictures.example:{server.port}\r\n" in head
        assert "Accept-Encoding: identity\r\n" in head

    lab(work)


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def work(server: PictureServer) -> None:
        assert await fetcher(server).fetch(server.url("/x.png"), "here") == PICTURE

    lab(work)


def test_the_certificate_must_be_of_the_name_although_an_address_is_dialled():
    trusting = ssl.create_default_context(cafile=CERTIFICATE)

    async def work(server: PictureServer) -> None:
        both = fetcher(server, "pictures.example,other.example", tls=trusting)
        assert await both.fetch(server.url("/x.png", scheme="https"), "here") == PICTURE
        assert server.names == ["pictures.example"]
        error = await refused(both.fetch(server.url("/x.png", "other.example", "https"), "here"))
        assert error.status == 502
        assert server.names[1:] == ["other.example"]
        unknown = fetcher(server)  # the system does not know this authority
        assert (await refused(unknown.fetch(server.url("/x.png", scheme="https"), "here"))).status == 502
        assert len(server.heads) == 1

    lab(work, tls=True)


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.1"],
        ["93.184.216.34", "127.0.0.1"],
        ["10.0.0.1", "93.184.216.34"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["::ffff:7f00:1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        ["2606:4700:4700::1111", "fe80::1%lo"],
        ["100.64.0.1"],
        ["169.254.169.254"],
    ],
)
def test_one_answer_that_is_not_public_is_enough_to_refuse(answers):
    async def work(server: PictureServer) -> None:
        names = Names(pictures_example=[answers])
        careful = fetcher(server, resolve=names, may_dial=is_public)
        error = await refused(careful.fetch(server.url("/x.png"), "here"))
        assert (error.status, error.code) == (400, "image_fetch_refused")
        assert error.message == "the image's host must have public addresses only"
        assert server.heads == []

    lab(work)


def test_the_address_that_was_checked_is_the_one_that_is_dialled():
    """A name that changes between two look-ups: there is no second look-up."""

    async def work(server: PictureServer) -> None:
        names = Names(pictures_example=[["127.0.0.1"], ["127.0.0.2"]])
        first_only = fetcher(server, resolve=names, may_dial=lambda address: str(address) == "127.0.0.1")
        assert await first_only.fetch(server.url("/x.png"), "here") == PICTURE
        assert names.asked == ["pictures.example"]
        await refused(first_only.fetch(server.url("/x.png"), "here"))  # the next image looks it up again
        assert len(server.heads) == 1

    lab(work)


def test_a_host_with_a_dead_address_is_reached_at_its_next_one():
    async def work(server: PictureServer) -> None:
        names = Names(pictures_example=[["127.0.0.2", "127.0.0.1"]])  # nothing listens on the first
        assert await fetcher(server, resolve=names).fetch(server.url("/x.png"), "here") == PICTURE

    lab(work)


def test_redirects_are_followed_three_times_and_each_is_checked():
    async def work(server: PictureServer) -> None:
        steps = {f"/{n}": redirect(f"/{n - 1}", status) for n, status in zip(range(1, 5), STATUSES, strict=True)}
        server.answers |= steps | {"/0": response(PICTURE)}
        assert await fetcher(server).fetch(server.url("/3"), "here") == PICTURE
        error = await refused(fetcher(server).fetch(server.url("/4"), "here"))
        assert error.message == "the image's address redirects more than 3 times"
        assert len(server.heads) == 8

    STATUSES = ("301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect")
    lab(work)


@pytest.mark.parametrize(
    ("location", "rule"),
    [
        ("http://169.254.169.254/latest/meta-data/", "not one that this server fetches from"),
        ("http://localhost/x.png", "not one that this server fetches from"),
        ("//other.example/x.png", "not one that this server fetches from"),
        ("http://pictures.example:22/", "does not fetch from port 22"),
        ("http://user:pw@pictures.example/x.png", "user name or password"),
        ("http://pictures.example\\@other.example/x.png", "user name|not plain"),
        ("file:///etc/passwd", "http:// or https://"),
        ("gopher://pictures.example/", "http:// or https://"),
    ],
)
def test_a_redirect_cannot_leave_what_was_named(location, rule):
    async def work(server: PictureServer) -> None:
        error = await refused(fetcher(server).fetch(server.url("/hop"), "here"))
        assert error.status == 400
        assert re.search(rule, error.message)
        assert len(server.heads) == 1

    lab(work, {"/hop": redirect(location)})


def test_a_redirect_to_a_name_that_means_us_is_refused():
    async def work(server: PictureServer) -> None:
        names = Names(pictures_example=[["127.0.0.1"]], inside_example=[["127.0.0.2"]])
        only_first = lambda address: str(address) == "127.0.0.1"  # noqa: E731
        server.answers["/hop"] = redirect(server.url("/x.png", "inside.example"))
        both = fetcher(server, "pictures.example,inside.example", resolve=names, may_dial=only_first)
        error = await refused(both.fetch(server.url("/hop"), "here"))
        assert "public addresses only" in error.message
        assert len(server.heads) == 1

    lab(work)


def test_a_name_that_changes_during_a_redirect_is_checked_again():
    async def work(server: PictureServer) -> None:
        names = Names(pictures_example=[["127.0.0.1"], ["127.0.0.2"]])
        server.answers["/hop"] = redirect("/x.png")
        rebinding = fetcher(server, resolve=names, may_dial=lambda address: str(address) == "127.0.0.1")
        assert "public addresses only" in (await refused(rebinding.fetch(server.url("/hop"), "here"))).message
        assert len(server.heads) == 1

    lab(work)


def test_an_image_over_the_limit_ends_the_transfer():
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(10_000))
            await writer.drain()
            sent += 10_000

    async def work(server: PictureServer) -> None:
        for path in ("/declared", "/endless"):
            error = await refused(fetcher(server).fetch(server.url(path), "here"))
            assert error.status == 400
            assert error.message == "the image at the address is larger than 100000 bytes; send a smaller one"
        await eventually(lambda: server.open == 0)
        exact = fetcher(server, max_bytes=len(PICTURE))
        assert await exact.fetch(server.url("/x.png"), "here") == PICTURE

    lab(work, {"/declared": response(bytes(100_001)), "/endless": endless})
    assert sent < 20_000_000  # what sockets buffer


@pytest.mark.parametrize("after", ["nothing", "headers", "a byte at a time", "redirects"])
def test_a_slow_server_has_one_deadline_for_everything(after):
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if after != "nothing":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n")
        while after == "a byte at a time":
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)
        await reader.read()

    async def hop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.15)
        writer.write(redirect("/hop"))

    async def work(server: PictureServer) -> None:
        error = await refused(
            fetcher(server, seconds=0.3).fetch(server.url("/hop" if after == "redirects" else "/slow"), "here")
        )
        assert (error.status, error.message) == (504, "the image did not come within 0.3 s")
        await eventually(lambda: server.open == 0)

    lab(work, {"/slow": slow, "/hop": hop})


def test_a_name_server_that_does_not_answer_is_in_the_deadline_too():
    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    async def work(server: PictureServer) -> None:
        error = await refused(fetcher(server, seconds=0.1, resolve=never).fetch(server.url("/x.png"), "here"))
        assert error.status == 504

    lab(work)


def no_such_name(host: str, port: int) -> Any:
    raise OSError(-2, "Name or service not known: secret.internal")


async def no_address(host: str, port: int) -> list[str]:
    return []


@pytest.mark.parametrize("resolve", [no_such_name, no_address])
def test_a_name_without_an_address_is_a_502(resolve):
    async def work(server: PictureServer) -> None:
        error = await refused(fetcher(server, resolve=resolve).fetch(server.url("/x.png"), "here"))
        assert (error.status, error.message) == (502, "the name of the image's host has no address")

    lab(work)


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (response(b"secret", "404 Not Found"), 400, "status 404"),
        (response(b"secret", "403 Forbidden"), 400, "status 403"),
        (response(b"", "204 No Content"), 400, "status 204"),
        (response(PICTURE, "206 Partial Content"), 400, "status 206"),
        (response(b"secret", "500 Internal Server Error"), 502, "status 500"),
        (response(b"secret", "503 Busy"), 502, "status 503"),
        (response(PICTURE, Content_Encoding="gzip"), 400, "content encoding"),
        (response(PICTURE, Content_Encoding="identity, br"), 400, "content encoding"),
        (response(b"", "302 Found"), 400, "leads nowhere"),
        (b"SSH-2.0-secret\r\n", 502, "cannot be reached"),
        (b"", 502, "cannot be reached"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nshort", 502, "cannot be reached"),
        (b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 200_000 + b"\r\n\r\n", 502, "cannot be reached"),
    ],
)
def test_what_goes_wrong_at_the_remote_side_is_told_without_its_words(answer, status, says):
    async def work(server: PictureServer) -> None:
        error = await refused(fetcher(server).fetch(server.url("/bad"), "here"))
        assert (error.status, says in error.message) == (status, True), error.message

    lab(work, {"/bad": answer})


def test_what_an_image_is_is_read_from_its_bytes_not_from_its_type():
    async def work(server: PictureServer) -> None:
        server.answers |= {
            "/odd": response(PICTURE, Content_Type="text/html"),
            "/page": response(b"<html>secret</html>", Content_Type="image/png"),
            "/tiff": response(encoded_image(kind="TIFF"), Content_Type="image/png"),
        }
        app = app_of(FakeEngine(), fetcher=fetcher(server))
        assert (await ask(app, server.url("/odd"))).status_code == 200
        for path in ("/page", "/tiff"):
            answer = await ask(app, server.url("/x.png"), server.url(path))
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "not an image of a supported format" in error["message"]
            assert error["param"] == "messages[0].content[1]"

    lab(work)


def test_what_is_fetched_counts_as_held_until_it_is_prepared():
    async def work(server: PictureServer) -> None:
        large = encoded_image(kind="BMP", width=300, height=100)  # 90 kB
        server.answers["/large"] = response(large)
        bounds = Limits(max_body_bytes=2000, max_preparing_bytes=200_000)
        app = app_of(FakeEngine(), fetcher=fetcher(server), limits=bounds)
        assert (await ask(app, *[server.url("/large")] * 2)).status_code == 200
        over = await ask(app, *[server.url("/large")] * 3)
        assert over.status_code == 429
        assert "retry-after" in over.headers
        assert (await ask(app, *[server.url("/large")] * 2)).status_code == 200, "and nothing stays held"

    lab(work)


def test_a_client_that_leaves_ends_its_fetch():
    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def work(server: PictureServer) -> None:
        engine, metrics = FakeEngine(), Metrics()
        slow = fetcher(server, seconds=30.0, observe=metrics.image_fetch)
        content = [{"type": "image_url", "image_url": {"url": server.url("/stuck")}}]
        connection = Connection(
            app_of(engine, fetcher=slow), CHAT, {"messages": [{"role": "user", "content": content}]}
        )
        await eventually(lambda: server.heads)
        connection.leave()
        await connection.served
        await eventually(lambda: server.open == 0)
        assert engine.submissions == []
        count = metrics.registry.get_sample_value
        assert count("vitstripe_image_fetch_seconds_count", {"outcome": "abandoned"}) == 1

    lab(work, {"/stuck": stuck})


def test_only_so_many_images_are_fetched_at_once():
    release = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(response(PICTURE))

    async def work(server: PictureServer) -> None:
        two = fetcher(server, at_once=2)
        jobs = [asyncio.create_task(two.fetch(server.url("/wait"), "here")) for _ in range(5)]
        await eventually(lambda: server.open == 2)
        await asyncio.sleep(0.05)
        assert server.open == 2
        release.set()
        assert await asyncio.gather(*jobs) == [PICTURE] * 5

    lab(work, {"/wait": wait})


def test_the_system_s_own_resolver_is_asked_in_threads_of_the_fetcher():
    seen: list[str] = []

    async def run() -> None:
        asking = Fetcher(ImageHosts.parse("localhost"), max_bytes=1, may_dial=lambda a: bool(seen.append(str(a))))
        error = await refused(asking.fetch("http://localhost/", "here"))
        assert error.message == "the image's host must have public addresses only"
        assert [t for t in threading.enumerate() if t.name.startswith("resolve")]
        asking.shutdown()

    asyncio.run(run())
    assert set(seen) <= {"127.0.0.1", "::1"}
    assert seen


def test_no_flag_leads_to_a_loopback_address():
    """What the tests use to reach their own server is not in the configuration: naming it is not enough."""
    for name in ("localhost", "127.0.0.1", "2130706433", "0x7f.1", "0"):
        hosts = image_hosts(parser().parse_args(["--model", "demo", "--image-hosts", name]))
        assert hosts is not None

        async def run(hosts: ImageHosts = hosts, name: str = name) -> None:
            error = await refused(Fetcher(hosts, max_bytes=1000).fetch(f"http://{name}/x.png", "here"))
            assert error.message in (
                "the image's host must have public addresses only",
                "the name of the image's host has no address",
            )

        asyncio.run(run())


@pytest.mark.parametrize("text", ["", "*.example", "https://a.example", "a.example:http"])
def test_a_host_that_cannot_be_one_is_a_usage_error(text):
    with pytest.raises(UsageError, match=r"--image-hosts: '.*' is not a host name"):
        image_hosts(parser().parse_args(["--model", "demo", "--image-hosts", text]))
