"""Files that nobody sends by accident, made in place: name -> (bytes, how preparing them ends).

The ending is a part of the error's text, or a token count.
"""

import io
import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image

from tests.vitbatch.pictures import encoded, noise

UNREADABLE = "the image cannot be decoded: send a complete PNG, JPEG, WebP, GIF or BMP file"
CAP = 4_000_000
"""Pixels that the test's processor decodes at most."""
TOO_MANY = f"pixels; the limit is {CAP}: send a smaller image"

Ending = str | int


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    body: bytes = b"",
    *,
    depth: int = 1,
    colour: int = 0,
    interlaced: bool = False,
    extra: bytes = b"",
) -> bytes:
    """A PNG whose header claims the given size, depth and colour type. body: filtered lines, uncompressed. extra:
    chunks before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    pixels = chunk(b"IDAT", zlib.compress(body))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + pixels + chunk(b"IEND", b"")


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


def _photo(mode: str, size: tuple[int, int] = (80, 60)) -> Image.Image:
    return Image.fromarray(noise(size[1], size[0], 0)).convert(mode)


def _gif_with_a_large_frame() -> bytes:
    """A screen of one pixel, and a frame of 65535 x 65535."""
    data = bytearray(encoded(Image.new("P", (1, 1)), "GIF"))
    frame = data.index(b",\0\0\0\0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    return bytes(data)


def _webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP whose canvas is not its picture's size."""
    picture = encoded(_photo("RGB"), "WEBP")[12:]
    sizes = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + bytes(4) + sizes + picture
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _jpeg_of(width: int, height: int) -> bytes:
    """A JPEG whose frame header claims the given size."""
    data = bytearray(encoded(_photo("RGB"), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def _bmp_of(width: int, height: int) -> bytes:
    data = bytearray(encoded(_photo("RGB"), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def _many_scans() -> bytes:
    """A progressive JPEG whose last scan is there 200 times."""
    data = encoded(_photo("RGB"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 200 + b"\xff\xd9"


def _readable() -> dict[str, tuple[bytes, Ending]]:
    made: dict[str, tuple[bytes, Ending]] = {}
    for w, h, tokens in ((1, 1, 1), (1, 2, 2), (2, 1, 2), (3, 3, 1), (31, 33, 1), (200, 1, 15), (1, 200, 15)):
        made[f"{w}x{h} png"] = encoded(Image.new("RGB", (w, h), "red"), "PNG"), tokens
    for kind in ("JPEG", "WEBP", "GIF", "BMP"):
        made[f"1x1 {kind}"] = encoded(Image.new("RGB", (1, 1), "red"), kind), 1
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = Image.fromarray(np.full((60, 80), 999, np.uint16)) if mode == "I;16" else _photo(mode)
        made[f"mode {mode} png"] = encoded(image, "PNG"), 4
    for mode in ("L", "CMYK", "YCbCr"):
        made[f"mode {mode} jpeg"] = encoded(_photo(mode), "JPEG"), 4
    made["palette with alpha"] = encoded(_photo("P"), "PNG", transparency=bytes(range(200))), 4
    made["colour made transparent"] = encoded(_photo("RGB"), "PNG", transparency=(1, 2, 3)), 4
    made["interlaced"] = png(8, 8, bytes(30), interlaced=True), 1
    for orientation in range(10):
        turned = encoded(_photo("RGB", (130, 60)), "JPEG", exif=exif(orientation))
        made[f"exif {orientation}"] = turned, 8
    made["exif garbage"] = encoded(_photo("RGB"), "WEBP", exif=b"Exif\0\0not a TIFF header"), 4
    made["png before a web page"] = encoded(_photo("RGB"), "PNG") + b"<html><script>alert(1)</script>", 4
    made["gif before an archive"] = encoded(_photo("P"), "GIF") + b"PK\5\6" + bytes(18), 4
    made["jpeg with a program in its comment"] = encoded(_photo("RGB"), "JPEG", comment=b"<?php exit; ?>"), 4
    made["more data than pixels"] = png(8, 8, bytes(30_000_000)), 1
    return made


def _cut() -> dict[str, tuple[bytes, Ending]]:
    made: dict[str, tuple[bytes, Ending]] = {}
    for kind in ("PNG", "JPEG"):
        whole = encoded(_photo("RGB"), kind)
        for tenth in range(1, 10):
            made[f"{tenth} tenths of a {kind}"] = whole[: len(whole) * tenth // 10], UNREADABLE
    for kind in ("WEBP", "GIF", "BMP"):
        whole = encoded(_photo("RGB"), kind)
        made[f"half a {kind}"] = whole[: len(whole) // 2], UNREADABLE
    made["jpeg without its last 128 bytes"] = encoded(_photo("RGB"), "JPEG")[:-128], UNREADABLE
    made["header of a png"] = png(64, 64)[:33], UNREADABLE
    return made


def _bombs() -> dict[str, tuple[bytes, Ending]]:
    text = zlib.compress(bytes(30_000_000), 9)
    return {
        "png of 144 MP": (png(12000, 12000, bytes(12000 * 1501)), TOO_MANY),
        "png of 900 MP": (png(30000, 30000), TOO_MANY),
        "png of 2^62 pixels": (png(2**31 - 1, 2**31 - 1), TOO_MANY),
        "bmp of 3600 MP": (_bmp_of(60000, 60000), TOO_MANY),
        "bmp of negative width": (_bmp_of(-80, 60), TOO_MANY),
        "gif screen of 4 GP": (encoded(Image.new("P", (9, 9)), "GIF").replace(b"\t\0\t\0", b"\xff" * 4, 1), TOO_MANY),
        "gif frame of 4 GP": (_gif_with_a_large_frame(), TOO_MANY),
        "webp of 268 MP": (_webp_canvas(16383, 16383), TOO_MANY),
        "jpeg of 4 GP": (_jpeg_of(65500, 65500), TOO_MANY),
        "jpeg of 100 MP": (_jpeg_of(10000, 10000), TOO_MANY),
        "jpeg of 3.9 MP, nearly all of them missing": (_jpeg_of(1950, 2000), 56),
        "jpeg of 200 scans": (_many_scans(), "the JPEG has 2"),
        "colour profile of 30 MB": (png(8, 8, bytes(16), extra=chunk(b"iCCP", b"x\0\0" + text)), UNREADABLE),
        "text of 30 MB": (png(8, 8, bytes(16), extra=chunk(b"zTXt", b"x\0\0" + text)), UNREADABLE),
        "strip of 1x10000": (encoded(Image.new("L", (10000, 1)), "PNG"), "image of 10000x1 px: aspect ratio 10000 is"),
        "strip of 10000x1": (encoded(Image.new("L", (1, 10000)), "PNG"), "image of 1x10000 px: aspect ratio 10000 is"),
    }


def _damaged() -> dict[str, tuple[bytes, Ending]]:
    good = encoded(_photo("RGB"), "PNG")
    checksum = bytearray(good)
    checksum[good.index(b"IDAT") + 12] ^= 1
    header = bytearray(good)
    header[20] ^= 1
    float_tiff = io.BytesIO()
    Image.fromarray(np.ones((8, 8), np.float32)).save(float_tiff, "TIFF")
    endings = {
        "nothing": b"",
        "one byte": b"\x89",
        "text": b"not an image",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>',
        "archive": b"PK\3\4" + bytes(60),
        "pdf": b"%PDF-1.4\n%%EOF",
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        "text that starts like a bmp": b"BMW drivers",
        "tiff": encoded(_photo("RGB"), "TIFF"),
        "tiff of floats": float_tiff.getvalue(),
        "ico": encoded(_photo("RGB"), "ICO"),
        "jpeg called png": b"\x89PNG\r\n\x1a\n" + encoded(_photo("RGB"), "JPEG"),
        "png called jpeg": b"\xff\xd8\xff" + good,
        "bad checksum of pixels": bytes(checksum),
        "bad checksum of the header": bytes(header),
        "no pixels": png(64, 64),
        "no width": png(0, 5, bytes(5)),
        "palette missing": png(8, 8, bytes(72), depth=8, colour=3),
        "depth of 3 bits": png(8, 8, bytes(72), depth=3),
        "pixels that do not inflate": good[:33] + chunk(b"IDAT", b"\x78\x9c" + bytes(50)) + chunk(b"IEND", b""),
    }
    lengthened = good[:33] + b"\xff\xff\xff\xffIDAT" + good[41:]
    made: dict[str, tuple[bytes, Ending]] = {name: (data, UNREADABLE) for name, data in endings.items()}
    return made | {"chunk that claims 4 GB": (lengthened, 4)}


@cache
def hostile_files() -> dict[str, tuple[bytes, Ending]]:
    return _readable() | _cut() | _bombs() | _damaged()
