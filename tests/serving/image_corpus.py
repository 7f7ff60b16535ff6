"""Two hundred and some image files that nobody sends by accident, or that somebody might: name -> bytes."""

import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image

from tests.vitbatch.hostile import exif, hostile_files, png
from tests.vitbatch.pictures import encoded, noise

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK", "YCbCr"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("1", "L", "P"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
}


def _photo(mode: str, width: int = 90, height: int = 70) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray((noise(height, width, 3)[..., 0].astype(np.uint16) * 257).astype(np.uint16))
    return Image.fromarray(noise(height, width, 3)).convert(mode)


def _sizes() -> dict[str, bytes]:
    """1x1 to 1x10000 and the other way round, and the sizes around a patch and a token."""
    strips = [(1, side) for side in (1, 2, 3, 15, 16, 17, 199, 200, 201, 999, 10_000)]
    others = [(16, 16), (26, 28), (28, 28), (31, 33), (32, 32), (33, 31), (500, 19), (1000, 37), (2000, 11), (640, 480)]
    sizes = dict.fromkeys([*strips, *[(h, w) for w, h in strips], *others])
    return {f"{w}x{h}": encoded(Image.new("RGB", (w, h), (w % 256, h % 256, 99)), "PNG") for w, h in sizes}


def _modes() -> dict[str, bytes]:
    return {f"{kind} of mode {mode}": encoded(_photo(mode), kind) for kind, modes in _MODES.items() for mode in modes}


def _turned() -> dict[str, bytes]:
    return {
        f"{kind} with EXIF orientation {turn}": encoded(_photo("RGB"), kind, exif=exif(turn))
        for kind in ("JPEG", "PNG", "WEBP")
        for turn in range(1, 9)
    }


def _cut() -> dict[str, bytes]:
    made = {}
    for kind in FORMATS:
        whole = encoded(_photo("P" if kind == "GIF" else "RGB"), kind)
        made |= {f"{tenth} tenths of a {kind}": whole[: len(whole) * tenth // 10] for tenth in range(10)}
    return made


def _two_in_one() -> dict[str, bytes]:
    files = {kind: encoded(_photo("P" if kind == "GIF" else "RGB"), kind) for kind in FORMATS}
    made = {f"{a} and then {b}": files[a] + files[b] for a in FORMATS for b in FORMATS if a != b}
    page = b"<html><script>alert(1)</script></html>"
    made |= {f"{kind} and then a page": data + page for kind, data in files.items()}
    made |= {f"a page and then {kind}": page + data for kind, data in files.items()}
    return made


def _animations() -> dict[str, bytes]:
    frames = [_photo("RGB").point(lambda level, n=n: (level + n) % 256) for n in range(40)]
    return {
        f"{kind} of 40 frames": encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        for kind in ("GIF", "WEBP", "PNG")
    }


def _icc_bomb() -> bytes:
    """A PNG whose colour profile claims to inflate to 100 MB."""
    profile = b"icc\0\0" + zlib.compress(bytes(100_000_000), 9)
    chunk = b"iCCP" + profile
    extra = struct.pack(">I", len(profile)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png(8, 8, bytes(16), extra=extra)


@cache
def image_corpus() -> dict[str, bytes]:
    made = {name: data for name, (data, _) in hostile_files().items()}
    made |= _sizes() | _modes() | _turned() | _cut() | _two_in_one() | _animations()
    return made | {"colour profile of 100 MB": _icc_bomb()}
