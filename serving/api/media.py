"""Images of a request: from what the client sent to prepared images.

An image comes inside the request as a data URI, or from a host that this server was told to fetch from. Never from a
file of this machine. What it is, is read from its first bytes, not from the declared media type; its size and that of
all images together are checked before any is decoded.
"""

import asyncio
import base64
import binascii
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from serving.api.errors import invalid
from serving.api.fetch import Fetcher, Hold
from serving.api.intake import Intake, Workers
from serving.api.limits import Limits
from serving.protocol import PreparedImage
from vitbatch import ImageError
from vitbatch.images.decode import open_image
from vitbatch.images.patches import Spread

T = TypeVar("T")

_DATA_URI = re.compile(
    r"data:([A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+)?(;[A-Za-z0-9_-]+=[A-Za-z0-9_.\"-]+)*;base64", re.IGNORECASE
)
_HEADER_CHARS = 256
_FORMATS = "PNG, JPEG, WebP, GIF and BMP"


@runtime_checkable
class ImageProcessor(Protocol):
    """`vitbatch`'s image processor: thread-safe host work that raises `vitbatch.ImageError` with a text fit to show."""

    def prepare(self, image: bytes, *, spread: Spread) -> PreparedImage: ...


@dataclass(frozen=True)
class Inline:
    """An image in the request: base64 text, not decoded yet."""

    payload: str


@dataclass(frozen=True)
class Remote:
    """An image to be fetched, if this server does that."""

    url: str


ImageSource = Inline | Remote


class Sent(Protocol):
    """An image part of a message. `param` names it in errors."""

    @property
    def source(self) -> ImageSource: ...

    @property
    def param(self) -> str: ...


def image_source(uri: str, param: str, limits: Limits) -> ImageSource:
    """Where an image is to come from; nothing is decoded or fetched.

    Raises:
        ApiError: 400: neither a base64 data URI nor an http or https address, or larger than `limits.max_image_bytes`.
    """
    if uri[:8].lower().startswith(("http:", "https:")):
        return Remote(uri)
    # The header of a data URI is short; searching a whole image for the comma would be wasted on a bad one.
    comma = uri.find(",", 0, _HEADER_CHARS)
    if comma < 0 or not _DATA_URI.fullmatch(uri, 0, comma):
        raise invalid('an image must be a base64 data URI ("data:image/png;base64,...")', param)
    payload = uri[comma + 1 :]
    size = len(payload) * 3 // 4 - payload[-2:].count("=")
    if size > limits.max_image_bytes:
        raise invalid(
            f"image of {size} bytes: the limit is {limits.max_image_bytes}; send a smaller or more compressed one",
            param,
        )
    return Inline(payload)


class ImageIntake:
    """Turns the image parts of requests into prepared images, in a bounded number of threads.

    Args:
        processor: None for a model that reads text only; images are then refused.
        fetcher: None for a server that fetches nothing.
    """

    def __init__(
        self, processor: ImageProcessor | None, limits: Limits, intake: Intake, fetcher: Fetcher | None = None
    ):
        self._processor, self._limits, self._intake, self._fetcher = processor, limits, intake, fetcher
        self._workers = Workers(limits.image_workers, "image")
        self._room = PixelRoom(limits.max_decoding_pixels)

    async def prepare(self, parts: Sequence[Sent]) -> list[PreparedImage]:
        """Prepared images in order. What is fetched counts as held until all are prepared.

        Raises:
            ApiError: 400 and the codes of `Fetcher.fetch`, naming the image; 429 when too much is held already.
        """
        if not parts:
            return []
        processor = self._processor
        if processor is None:
            raise invalid("this model reads text only; send no images", parts[0].param, "unsupported_value")
        with self._intake.hold() as hold:
            files = await self._files(parts, hold)
            sizes = await self._sizes(files, parts)
            work = [
                partial(self._prepared, data, pixels, part.param, processor)
                for data, pixels, part in zip(files, sizes, parts, strict=True)
            ]
            return await self._workers.map(_call, work)

    def _prepared(self, encoded: bytes, pixels: int, param: str, processor: ImageProcessor) -> PreparedImage:
        with self._room.hold(pixels):
            return prepare_image(encoded, param, processor, self._workers.spread)

    def shutdown(self) -> None:
        self._workers.shutdown()
        if self._fetcher is not None:
            self._fetcher.shutdown()

    async def _files(self, parts: Sequence[Sent], hold: Hold) -> list[bytes]:
        tasks = [asyncio.ensure_future(self._file(part, hold)) for part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _file(self, part: Sent, hold: Hold) -> bytes:
        match part.source:
            case Inline(payload):
                return await self._workers.run(decode_payload, payload, part.param)
            case Remote(url):
                if self._fetcher is None:
                    raise invalid(
                        "remote images are off on this server; send the image itself as a data URI "
                        '("data:image/png;base64,...")',
                        part.param,
                        "unsupported_value",
                    )
                return await self._fetcher.fetch(url, part.param, hold)

    async def _sizes(self, files: Sequence[bytes], parts: Sequence[Sent]) -> list[int]:
        """Pixels of each file. Raises ApiError: 400, too many in one or in all."""
        measure = [partial(pixels_of, data, p.param, self._limits) for data, p in zip(files, parts, strict=True)]
        sizes = await self._workers.map(_call, measure)
        total = sum(sizes)
        if total > self._limits.max_request_pixels:
            raise invalid(
                f"the images have {total} pixels together; the limit is {self._limits.max_request_pixels}: send fewer "
                "or smaller images",
                parts[-1].param,
            )
        return sizes


class PixelRoom:
    """Room for the pixels that are decoded at one time, in the order it was asked for. Threads wait in it."""

    def __init__(self, limit: int):
        """limit: pixels; more are let in alone."""
        self._limit, self._held = limit, 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Waits until there is room, and leaves it at the end."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._fits(pixels))
            self._waiting.popleft()
            self._held += pixels
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= pixels
                self._changed.notify_all()

    def _fits(self, pixels: int) -> bool:
        return not self._held or self._held + pixels <= self._limit


def decode_payload(payload: str, param: str) -> bytes:
    """The file in a data URI.

    Raises:
        ApiError: 400: not strict base64.
    """
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(
            "the image's base64 is damaged: no line breaks, blanks or missing padding are allowed", param
        ) from None


def pixels_of(encoded: bytes, param: str, limits: Limits) -> int:
    """Pixels of a file, from its header.

    Raises:
        ApiError: 400: not an image of a known format, or more than `limits.max_image_pixels`.
    """
    if not _is_known_format(encoded):
        raise invalid(f"the data is not an image of a supported format ({_FORMATS})", param)
    try:
        width, height = open_image(encoded, limits.max_image_pixels).size
    except ImageError as error:
        raise invalid(str(error), param) from None
    return width * height


def prepare_image(encoded: bytes, param: str, processor: ImageProcessor, spread: Spread) -> PreparedImage:
    """Decode, resize and cut. Runs in a worker thread; `spread` has others help.

    Raises:
        ApiError: 400, with a text that holds nothing of a decoder's own messages.
    """
    try:
        return processor.prepare(encoded, spread=spread)
    except ImageError as error:
        raise invalid(str(error), param) from None


def _call(work: partial[T]) -> T:
    return work()


def _is_known_format(encoded: bytes) -> bool:
    return encoded.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM")) or (
        encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP"
    )
