"""A web server on a loopback address that does whatever a test says, and a resolver that calls it any name."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from serving.api.fetch import Fetcher
from serving.api.remote import ImageHosts
from tests.helpers import DATA

CERTIFICATE, KEY = DATA / "tls" / "pictures.crt", DATA / "tls" / "pictures.key"
Answer = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return response(b"an error page", status, Location=location)


@dataclass
class PictureServer:
    """answers: path -> raw response, or a function of the streams. heads: of all requests. names: asked for by TLS."""

    answers: dict[str, Answer]
    port: int = 0
    heads: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    open: int = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            answer = self.answers[head.split()[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def url(self, path: str, host: str = "pictures.example", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


@asynccontextmanager
async def pictures(answers: dict[str, Answer], *, tls: bool = False) -> AsyncIterator[PictureServer]:
    lab = PictureServer(answers)
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE, KEY)
        context.sni_callback = lambda _, name, __: lab.names.append(name)
    server = await asyncio.start_server(lab._serve, "127.0.0.1", 0, ssl=context)
    lab.port = server.sockets[0].getsockname()[1]
    try:
        yield lab
    finally:
        server.close()


class Names:
    """A resolver. answers: name -> the addresses of each look-up in turn, the last one for ever after."""

    def __init__(self, **answers: Sequence[Sequence[str]]):
        self._answers = {name.replace("_", "."): list(turns) for name, turns in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        turns = self._answers[host]
        return turns.pop(0) if len(turns) > 1 else turns[0]


def fetcher(lab: PictureServer, hosts: str = "pictures.example", **options: Any) -> Fetcher:
    """A fetcher that finds the lab under every name and may dial it."""

    async def here(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    named = ImageHosts.parse(",".join(f"{host}:{lab.port}" for host in hosts.split(",")))
    defaults: dict[str, Any] = {"max_bytes": 100_000, "seconds": 5.0, "resolve": here, "may_dial": lambda address: True}
    return Fetcher(named, **(defaults | options))
