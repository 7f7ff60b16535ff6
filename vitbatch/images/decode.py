"""Files, PIL images and arrays to upright RGB. Hostile input costs a header, or at most its decoded pixels.

Decisions that the reference image processors leave open: EXIF orientation is applied; transparency is composited on
white; 16-bit grey is scaled to 8 bits; of an animation the first frame is used.
"""

import io

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from vitbatch.images.prepared import ImageError

# Naming the classes registers their formats: Pillow would otherwise import every plugin it has to find WebP.
_FORMATS = [str(kind.format) for kind in (PngImageFile, JpegImageFile, WebPImageFile, GifImageFile, BmpImageFile)]
_START_OF_SCAN = b"\xff\xda"
_MAX_SCANS = 100
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_UNREADABLE = "the image cannot be decoded: send a complete PNG, JPEG, WebP, GIF or BMP file"


def open_image(image: Image.Image | bytes, max_pixels: int) -> Image.Image:
    """Reads no more than the header of an encoded image, and refuses empty and oversized ones by it.

    Raises ImageError: unreadable, empty, more than `max_pixels`.
    """
    opened = image if isinstance(image, Image.Image) else _open_data(image, max_pixels)
    _check_size(*opened.size, max_pixels)
    return opened


def open_array(image: np.ndarray, max_pixels: int) -> UInt8[np.ndarray, "H W 3"]:
    """`image`, line after line in memory.

    Raises ImageError: empty, more than `max_pixels`, other than uint8 [height, width, 3].
    """
    # Only one layout is taken: guessing from the shape reads a 1x3 image as channels first.
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ImageError(f"array of {image.dtype} {list(image.shape)}: give uint8 [height, width, 3] RGB")
    _check_size(image.shape[1], image.shape[0], max_pixels)
    return np.ascontiguousarray(image)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if not width or not height:
        raise ImageError(f"image of {width}x{height} px is empty")
    if width * height > max_pixels:
        raise ImageError(
            f"image of {width}x{height} px has {width * height} pixels; the limit is {max_pixels}: send a smaller image"
        )


def _open_data(image: bytes, max_pixels: int) -> Image.Image:
    try:
        opened = Image.open(io.BytesIO(image), formats=_FORMATS)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        # Pillow's own guard, which looks before we can.
        raise ImageError(f"the image has too many pixels; the limit is {max_pixels}: send a smaller image") from None
    except Exception:
        # Parsers of hostile files raise anything; their texts are internals.
        raise ImageError(_UNREADABLE) from None
    # A progressive JPEG goes over all its pixels once a scan, and a scan may be a few bytes. Encoders write about ten.
    if isinstance(opened, JpegImageFile) and (scans := image.count(_START_OF_SCAN)) > _MAX_SCANS:
        raise ImageError(f"the JPEG has {scans} scans; the limit is {_MAX_SCANS}: save it again as a baseline JPEG")
    return opened


def upright_rgb(image: Image.Image) -> Image.Image:
    """The pixels of an opened image: RGB, turned as its EXIF says. `image` itself where it is that already.

    Raises ImageError: damaged data, or pixels without a known range (floats, integers of more than 16 bits).
    """
    try:
        image.load()
        return _to_rgb(_upright(image))
    except ImageError:
        raise
    except Exception:
        raise ImageError(_UNREADABLE) from None


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:
        # Pixels are fine whatever the metadata is; viewers show such an image as stored.
        return image
    turn = _UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = _grey_from_16_bits(image)
    elif image.mode == "F":
        raise ImageError("an image of floating-point pixels has no known range: convert it to 8 bits")
    if image.mode in ("La", "RGBa"):  # alpha already multiplied in
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _grey_from_16_bits(image: Image.Image) -> Image.Image:
    """Scales, where Pillow's own conversion would clip at 255."""
    levels = np.asarray(image)
    if levels.min() < 0 or levels.max() > 65535:
        raise ImageError("grey levels outside 0..65535 have no known range: convert the image to 8 bits")
    # levels / 257, rounded half up.
    grey = Image.fromarray(((levels.astype(np.uint32) + 128) // 257).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8)))
    return grey
