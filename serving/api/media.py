"""Images of a request: data URIs to prepared images.

Nothing is ever fetched: no remote address, no file of this machine. What an image is, is read from its first bytes, not
from the declared media type. The size is checked before anything is decoded.
"""

import base64
import binascii
import re
from typing import Protocol, runtime_checkable

from serving.api.errors import invalid
from serving.api.limits import Limits
from serving.protocol import PreparedImage
from vitbatch import ImageError

_DATA_URI = re.compile(
    r"data:([A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+)?(;[A-Za-z0-9_-]+=[A-Za-z0-9_.\"-]+)*;base64", re.IGNORECASE
)
_HEADER_CHARS = 256
_FORMATS = "PNG, JPEG, WebP, GIF and BMP"


@runtime_checkable
class ImageProcessor(Protocol):
    """`vitbatch`'s image processor: thread-safe host work that raises `vitbatch.ImageError` with a text fit to show."""

    def prepare(self, image: bytes) -> PreparedImage: ...


def data_uri_payload(uri: str, param: str, limits: Limits) -> str:
    """The base64 text of a data URI, its size checked and nothing decoded.

    Raises:
        ApiError: 400: not a base64 data URI, or larger than `limits.max_image_bytes`.
    """
    scheme = uri[:8].lower()
    if scheme.startswith(("http:", "https:")):
        raise invalid(
            'remote images are off on this server; send the image itself as a data URI ("data:image/png;base64,...")',
            param,
            "unsupported_value",
        )
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
    return payload


def prepare_image(payload: str, param: str, processor: ImageProcessor) -> PreparedImage:
    """Decode base64 strictly, recognise the format and prepare the image. Runs in a worker thread.

    Raises:
        ApiError: 400, with a text that holds nothing of a decoder's own messages.
    """
    try:
        encoded = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(
            "the image's base64 is damaged: no line breaks, blanks or missing padding are allowed", param
        ) from None
    if not _is_known_format(encoded):
        raise invalid(f"the data is not an image of a supported format ({_FORMATS})", param)
    try:
        return processor.prepare(encoded)
    except ImageError as error:
        raise invalid(str(error), param) from None


def _is_known_format(encoded: bytes) -> bool:
    return encoded.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM")) or (
        encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP"
    )
