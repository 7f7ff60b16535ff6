"""Fetches images from the hosts that were named, so that nothing behind this server can be reached through it.

```
address -> parse -> host and port named? -> resolve once -> every answer public? -> dial a checked answer
             ^                                                                        |
             '------------------ redirect, 3 at most, all of it again ----------------'
```

The connection is made to an address that was checked, never to a name: a second look-up could give another answer. No
proxy of the environment is used, no cookie kept, nothing cached by address.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from typing import cast

import httpcore2

from serving.api.errors import ApiError, invalid
from serving.api.remote import ImageHosts, IpAddress, Refused, RemoteUrl, is_public, parse_url, redirected

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Hold = Callable[[int], None]

MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RESOLVERS = 4
_CONNECT_SHARE = 0.4  # of the time for an image; an address that does not answer leaves some for the next
_HEADERS = [
    (b"Accept", b"image/png, image/jpeg, image/webp, image/gif, image/bmp"),
    (b"Accept-Encoding", b"identity"),
    (b"User-Agent", b"vitstripe"),
    (b"Connection", b"close"),
]


class Fetcher:
    """Fetches images. One for a server; used on its event loop.

    Args:
        hosts: where images may come from.
        max_bytes: of one image.
        seconds: for one image, all look-ups and redirects included.
        at_once: images that are fetched at a time; more wait.
        resolve: (host, port) -> its addresses as text; None asks the system.
        may_dial: which addresses may be dialled. Tests stand their own servers on a loopback address; no flag leads
            here.
        tls: how servers prove their name; None is the system's way.
        observe: called with ok, refused, unreachable, timeout or abandoned, and the seconds it took, for each image.
    """

    def __init__(
        self,
        hosts: ImageHosts,
        *,
        max_bytes: int,
        seconds: float = 10.0,
        at_once: int = 16,
        resolve: Resolve | None = None,
        may_dial: Callable[[IpAddress], bool] = is_public,
        tls: ssl.SSLContext | None = None,
        observe: Callable[[str, float], None] = lambda outcome, seconds: None,
    ):
        self._hosts, self._max_bytes, self._seconds = hosts, max_bytes, seconds
        self._places = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")
        self._resolve = resolve or self._ask_system
        self._may_dial, self._tls, self._observe = may_dial, tls, observe

    async def fetch(self, text: str, param: str, hold: Hold = lambda size: None) -> bytes:
        """The bytes at an address.

        Args:
            hold: told how many bytes came, as they come; may raise to end the fetch.

        Raises:
            ApiError: 400 for what a rule forbids and for what the remote server refuses, 502 for a server that cannot
                be reached or fails, 504 for one that is too slow. The texts name the rule, and nothing that was found
                out on the way.
        """
        async with self._places:
            loop = asyncio.get_running_loop()
            began, outcome = loop.time(), "abandoned"
            try:
                async with asyncio.timeout(self._seconds):
                    fetched = await self._follow(parse_url(text), hold)
                outcome = "ok"
                return fetched
            except Refused as refused:
                outcome = "refused"
                raise invalid(str(refused), param, "image_fetch_refused") from None
            except TimeoutError:
                outcome = "timeout"
                message = f"the image did not come within {self._seconds:g} s"
                raise ApiError(504, message, param=param, code="image_fetch_timeout") from None
            except _Unreachable as error:
                outcome = "unreachable"
                raise ApiError(502, str(error), param=param, code="image_fetch_failed") from None
            finally:
                self._observe(outcome, loop.time() - began)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, url: RemoteUrl, hold: Hold) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self._hosts.check(url)
            try:
                answer = await self._get(url, await self._checked_addresses(url), hold)
            except (TimeoutError, httpcore2.TimeoutException):
                raise TimeoutError from None
            except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError):
                raise _Unreachable("the image's host cannot be reached, or does not speak HTTP") from None
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise Refused(f"the image's address redirects more than {MAX_REDIRECTS} times")

    async def _checked_addresses(self, url: RemoteUrl) -> list[IpAddress]:
        """What the host's name means now. One answer that is not public spoils all: it may be an attempt to get in."""
        try:
            answers = [ip_address(answer) for answer in await self._resolve(url.host, url.port)]
        except (OSError, UnicodeError):
            answers = []
        if not answers:
            raise _Unreachable("the name of the image's host has no address")
        if not all(map(self._may_dial, answers)):
            raise Refused("the image's host must have public addresses only")
        return answers

    async def _get(self, url: RemoteUrl, addresses: Sequence[IpAddress], hold: Hold) -> bytes | RemoteUrl:
        """The body, or where a redirect leads."""
        host = url.host.encode()
        connection = httpcore2.AsyncHTTPConnection(
            httpcore2.Origin(url.scheme.encode(), host, url.port),
            ssl_context=self._tls,
            network_backend=_Dial(addresses, _CONNECT_SHARE * self._seconds),
        )
        request = httpcore2.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        headers = [(b"Host", url.host_header.encode()), *_HEADERS]
        async with connection, connection.stream("GET", request, headers=headers) as response:
            if response.status in _REDIRECTS:
                location = _header(response, b"location")
                if location is None:
                    raise Refused("a redirect of the image's address leads nowhere")
                return redirected(url, location)
            self._check_answer(response)
            return await self._body(response, hold)

    def _check_answer(self, response: httpcore2.Response) -> None:
        if response.status >= 500:
            raise _Unreachable(f"the image's host answered with status {response.status}")
        if response.status != 200:
            raise Refused(f"the image's host answered with status {response.status}")
        if (_header(response, b"content-encoding") or b"identity").lower() != b"identity":
            raise Refused("the image's host sent it with a content encoding, which is not accepted")
        length = _header(response, b"content-length") or b""
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            raise self._too_large()

    async def _body(self, response: httpcore2.Response, hold: Hold) -> bytes:
        parts, size = [], 0
        async for part in response.aiter_stream():
            size += len(part)
            if size > self._max_bytes:
                raise self._too_large()
            hold(len(part))
            parts.append(part)
        return b"".join(parts)

    def _too_large(self) -> Refused:
        return Refused(f"the image at the address is larger than {self._max_bytes} bytes; send a smaller one")

    async def _ask_system(self, host: str, port: int) -> list[str]:
        # Threads of its own: a look-up cannot be cancelled, and a dead name server must not take anybody else's.
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Unreachable(Exception):  # noqa: N818 -- the remote side's fault
    """The remote server failed; the text is fit to show."""


class _Dial(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that were checked, whatever name it is asked for."""

    def __init__(self, addresses: Sequence[IpAddress], seconds: float):
        self._addresses, self._seconds = addresses, seconds
        # Its declared type depends on which of its extras are there.
        self._network = cast(httpcore2.AsyncNetworkBackend, httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        *others, last = self._addresses
        for address in others:
            with suppress(httpcore2.NetworkError, httpcore2.TimeoutException):
                return await self._network.connect_tcp(str(address), port, self._seconds / len(self._addresses))
        return await self._network.connect_tcp(str(last), port, self._seconds)


def _header(response: httpcore2.Response, name: bytes) -> bytes | None:
    return next((value for key, value in response.headers if key.lower() == name), None)
