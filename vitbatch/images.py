"""Images on the host: bytes -> upright RGB -> resized canvas -> patch rows. Pillow and numpy only, thread-safe.

Decisions that the reference image processors leave open: EXIF orientation is applied; transparency is composited on
white; 16-bit grey is scaled to 8 bits; of an animation the first frame is used.
"""

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
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
_MAX_ASPECT_RATIO = 200

_UNREADABLE = "the image cannot be decoded: send a complete PNG, JPEG, WebP, GIF or BMP file"


class ImageError(ValueError):
    """An image that cannot be used. The text is safe to show to whoever sent it."""


@dataclass(frozen=True)
class PreparedImage:
    """An image ready for the encoder.

    patches: one frame, patches in merge-block order, features ordered (channel, y, x), not normalised.
    grid_thw: (1, rows, columns) of patches. key: 32-byte digest of the content and of the settings it was prepared
    with; equal keys mean equal patches. num_tokens: rows of its embedding. size: (height, width) as given, upright.
    """

    patches: UInt8[np.ndarray, "N F"]
    grid_thw: tuple[int, int, int]
    key: bytes
    num_tokens: int
    size: tuple[int, int]

    def __post_init__(self):
        frames, gh, gw = self.grid_thw
        if frames != 1 or self.patches.shape[0] != gh * gw:
            raise ValueError(f"{self.patches.shape[0]} patches do not fill the grid {self.grid_thw}")
        if len(self.key) < 16:
            raise ValueError(f"an image key of {len(self.key)} bytes is too short; use at least 16")


def smart_resize(h: int, w: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The canvas (height, width) of an h x w image in Qwen's rule: both sides multiples of `factor`, the area within
    [min_pixels, max_pixels] where rounding allows, the aspect ratio nearly kept.

    Raises ImageError above an aspect ratio of 200. Source: transformers' Qwen2-VL image processor.
    """
    if max(h, w) > _MAX_ASPECT_RATIO * min(h, w):
        ratio = max(h, w) / min(h, w)
        raise ImageError(f"image of {w}x{h} px: aspect ratio {ratio:g} is over {_MAX_ASPECT_RATIO}; crop it")
    height, width = round(h / factor) * factor, round(w / factor) * factor
    if height * width > max_pixels:
        shrink = math.sqrt(h * w / max_pixels)
        height = max(factor, math.floor(h / shrink / factor) * factor)
        width = max(factor, math.floor(w / shrink / factor) * factor)
    elif height * width < min_pixels:
        grow = math.sqrt(min_pixels / (h * w))
        height, width = math.ceil(h * grow / factor) * factor, math.ceil(w * grow / factor) * factor
    return height, width


def largest_canvas(factor: int, min_pixels: int, max_pixels: int) -> int:
    """An upper bound on the pixels of any canvas of `smart_resize`.

    Thin strips may exceed max_pixels: shrinking does not cut the short side below `factor`, and growing rounds both
    sides up, by less than `factor` each.
    """
    stretch = math.sqrt(_MAX_ASPECT_RATIO)
    shrunk = factor * math.floor(stretch * math.sqrt(max_pixels) / factor)
    side = math.sqrt(min_pixels) / factor
    grown = math.floor((side / stretch + 1) * (side * stretch + 1))
    return max(max_pixels, shrunk * factor, grown * factor**2)


@dataclass(frozen=True)
class ImageProcessor:
    """Prepares images for one tower.

    patch_size, merge_size: the tower's. min_pixels, max_pixels: bounds on the canvas. mean, std: normalisation of
    pixels scaled to [0, 1]; it happens on the device. max_decoded_pixels: refused above this, from the header.
    max_patches: refused above this (the largest bucket), before decoding; None for no limit.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    max_decoded_pixels: int = 64_000_000
    max_patches: int | None = None

    def __post_init__(self):
        _check_bounds(self.min_pixels, self.max_pixels, "preprocessor")
        if min(self.std) <= 0:
            raise ValueError(f"preprocessor: image_std is {self.std}; every entry must be positive")

    @property
    def factor(self) -> int:
        """Pixels a side of one token."""
        return self.patch_size * self.merge_size

    @property
    def largest_image_patches(self) -> int:
        """An upper bound on the patches of an image at the processor's own bounds."""
        patches = largest_canvas(self.factor, self.min_pixels, self.max_pixels) // self.patch_size**2
        return patches if self.max_patches is None else min(patches, self.max_patches)

    def canvas(self, h: int, w: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """Height and width that an h x w image is resized to."""
        return smart_resize(h, w, factor=self.factor, min_pixels=min_pixels, max_pixels=max_pixels)

    def prepare(
        self,
        image: "Image.Image | bytes | np.ndarray",
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> PreparedImage:
        """Decodes, resizes (bicubic) and cuts one image into patches.

        image: a PIL image, the bytes of a PNG, JPEG, WebP, GIF or BMP file, or an RGB uint8 array [height, width, 3].
        min_pixels, max_pixels: override the processor's bounds for this image.
        Raises ImageError: unreadable, too many pixels, aspect ratio over 200, more patches than the largest bucket;
        ValueError: bounds that contradict each other.
        """
        least = self.min_pixels if min_pixels is None else min_pixels
        most = self.max_pixels if max_pixels is None else max_pixels
        _check_bounds(least, most, "image")
        opened = _open(image, self.max_decoded_pixels)
        width, height = opened.size
        # Before decoding, so that an image that cannot be used costs nothing. Turning it upright changes neither.
        canvas_h, canvas_w = self.canvas(height, width, least, most)
        patches = canvas_h * canvas_w // self.patch_size**2
        if self.max_patches is not None and patches > self.max_patches:
            raise ImageError(
                f"image of {width}x{height} px needs {patches} patches; the limit is {self.max_patches}: send a "
                f"smaller image or set a smaller max_pixels"
            )
        rgb = _upright_rgb(opened)
        width, height = rgb.size
        canvas = self.canvas(height, width, least, most)
        key = self._key(rgb, least, most)
        if canvas != (height, width):
            rgb = rgb.resize((canvas[1], canvas[0]), Image.Resampling.BICUBIC)
        rows = patchify(np.asarray(rgb), self.patch_size, self.merge_size)
        grid = (1, canvas[0] // self.patch_size, canvas[1] // self.patch_size)
        return PreparedImage(rows, grid, key, rows.shape[0] // self.merge_size**2, (height, width))

    def _key(self, rgb: Image.Image, min_pixels: int, max_pixels: int) -> bytes:
        settings = (type(self).__name__, self.patch_size, self.merge_size, min_pixels, max_pixels, self.mean, self.std)
        # The size is part of it: 30x100 and 100x30 pixels may be the same bytes.
        digest = hashlib.sha256(repr((settings, rgb.size)).encode())
        digest.update(rgb.tobytes())
        return digest.digest()


def _check_bounds(min_pixels: int, max_pixels: int, where: str) -> None:
    if not 0 < min_pixels <= max_pixels:
        raise ValueError(f"{where}: min_pixels {min_pixels} must be positive and at most max_pixels {max_pixels}")


def patchify(image: UInt8[np.ndarray, "H W 3"], patch: int, merge: int) -> UInt8[np.ndarray, "N F"]:
    """[H, W, 3] -> rows in merge-block order (blocks row-major, row-major inside), features (channel, y, x)."""
    h, w, channels = image.shape
    side = patch * merge
    if h % side or w % side:
        raise ValueError(f"canvas {h}x{w} is not a multiple of {side} px")
    blocks = image.reshape(h // side, merge, patch, w // side, merge, patch, channels)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)


def _open(image: "Image.Image | bytes | np.ndarray", max_pixels: int) -> Image.Image:
    """Reads no more than the header of an encoded image, and refuses empty and oversized ones by it."""
    opened = image if isinstance(image, Image.Image) else _open_data(image, max_pixels)
    width, height = opened.size
    if not width or not height:
        raise ImageError(f"image of {width}x{height} px is empty")
    if width * height > max_pixels:
        raise ImageError(
            f"image of {width}x{height} px has {width * height} pixels; the limit is {max_pixels}: send a smaller image"
        )
    return opened


def _open_data(image: "bytes | np.ndarray", max_pixels: int) -> Image.Image:
    if isinstance(image, np.ndarray):
        # Only one layout is taken: guessing from the shape reads a 1x3 image as channels first.
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ImageError(f"array of {image.dtype} {list(image.shape)}: give uint8 [height, width, 3] RGB")
        if not image.size:
            raise ImageError(f"image of {image.shape[1]}x{image.shape[0]} px is empty")  # Pillow cannot hold it
        return Image.fromarray(np.ascontiguousarray(image))
    try:
        return Image.open(io.BytesIO(image), formats=_FORMATS)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        # Pillow's own guard, which looks before we can.
        raise ImageError(f"the image has too many pixels; the limit is {max_pixels}: send a smaller image") from None
    except Exception:
        # Parsers of hostile files raise anything; their texts are internals.
        raise ImageError(_UNREADABLE) from None


def _upright_rgb(image: Image.Image) -> Image.Image:
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
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _grey_from_16_bits(image: Image.Image) -> Image.Image:
    """Scales, where Pillow's own conversion would clip at 255."""
    levels = np.asarray(image).astype(np.int64)
    if levels.min() < 0 or levels.max() > 65535:
        raise ImageError("grey levels outside 0..65535 have no known range: convert the image to 8 bits")
    grey = Image.fromarray(((levels + 128) // 257).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8)))
    return grey


def read_processor(
    settings: Mapping[str, Any],
    *,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_decoded_pixels: int = 64_000_000,
    max_patches: int | None = None,
) -> ImageProcessor:
    """An ImageProcessor from a parsed preprocessor_config.json.

    The bounds are `min_pixels` / `max_pixels`, else the file's fields of those names, else its `size`
    (shortest_edge / longest_edge, which count pixels of area). Raises ValueError for settings that are not supported
    or do not fit the tower.
    """
    for name, want in (
        ("patch_size", patch_size),
        ("merge_size", merge_size),
        ("temporal_patch_size", temporal_patch_size),
    ):
        if settings.get(name, want) != want:
            raise ValueError(f"preprocessor: {name} is {settings[name]} but the vision tower has {want}")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not settings.get(name, True):
            raise ValueError(f"preprocessor: {name} is off, which is not supported")
    if (resample := settings.get("resample", 3)) != Image.Resampling.BICUBIC:
        raise ValueError(f"preprocessor: resample is {resample}; only 3 (bicubic) is supported")
    if not math.isclose(factor := settings.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise ValueError(f"preprocessor: rescale_factor is {factor}; only 1/255 is supported")
    size = settings.get("size") or {}
    least = min_pixels or settings.get("min_pixels") or size.get("shortest_edge")
    most = max_pixels or settings.get("max_pixels") or size.get("longest_edge")
    if least is None or most is None:
        raise ValueError(
            "preprocessor: size lacks shortest_edge or longest_edge, and min_pixels or max_pixels is not set"
        )
    return ImageProcessor(
        patch_size=patch_size,
        merge_size=merge_size,
        min_pixels=int(least),
        max_pixels=int(most),
        mean=_three(settings, "image_mean"),
        std=_three(settings, "image_std"),
        max_decoded_pixels=max_decoded_pixels,
        max_patches=max_patches,
    )


def _three(settings: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = settings.get(name, [0.5, 0.5, 0.5])
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise ValueError(f"preprocessor: {name} is {values!r}; it must be three numbers")
    return float(values[0]), float(values[1]), float(values[2])
