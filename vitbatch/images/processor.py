"""ImageProcessor: one image to patch rows, by one family's rule. Pillow and numpy only, thread-safe."""

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitbatch.images import qwen
from vitbatch.images.decode import open_array, open_image, upright_rgb
from vitbatch.images.patches import Spread, one_by_one, resized_patches
from vitbatch.images.prepared import ImageError, PreparedImage
from vitbatch.images.rules import Fit, ResizeRule


@dataclass(frozen=True)
class ImageProcessor:
    """Prepares images for one tower.

    patch_size, merge_size, temporal_patch_size: the tower's. min_pixels, max_pixels: bounds on the canvas, in the units
    of the family's preprocessor_config.json (GLM-4V counts the pixels of both frames of a patch). mean, std:
    normalisation of pixels scaled to [0, 1]; it happens on the device. max_decoded_pixels: refused above this, from the
    header. max_patches: refused above this (the largest bucket), before decoding; None for no limit. rule: the
    family's.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    max_decoded_pixels: int = 64_000_000
    max_patches: int | None = None
    rule: ResizeRule = qwen.RULE
    temporal_patch_size: int = 2

    def __post_init__(self):
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"preprocessor: min_pixels {self.min_pixels} must be positive and at most max_pixels {self.max_pixels}"
            )
        if self.max_pixels < self.pixels_per_token:
            raise ValueError(
                f"preprocessor: max_pixels {self.max_pixels} holds no token of {self.pixels_per_token} pixels"
            )
        if min(self.std) <= 0:
            raise ValueError(f"preprocessor: image_std is {self.std}; every entry must be positive")

    @property
    def factor(self) -> int:
        """Pixels a side of one token."""
        return self.patch_size * self.merge_size

    @property
    def counted_frames(self) -> int:
        """Frames whose pixels the bounds count."""
        return self.temporal_patch_size if self.rule.counts_frames else 1

    @property
    def pixels_per_token(self) -> int:
        """What one token is in the units of min_pixels and max_pixels."""
        return self.counted_frames * self.factor**2

    @property
    def min_image_tokens(self) -> int:
        """The fewest tokens a call may ask for: min_pixels in tokens, rounded up."""
        return -(-self.min_pixels // self.pixels_per_token)

    @property
    def max_image_tokens(self) -> int:
        """The most tokens a call may ask for: max_pixels in tokens, rounded down."""
        return self.max_pixels // self.pixels_per_token

    @property
    def largest_image_patches(self) -> int:
        """An upper bound on the patches of an image at the processor's own bounds."""
        least, most = self._one_frame((self.min_pixels, self.max_pixels))
        patches = self.rule.largest_canvas(self.factor, least, most) // self.patch_size**2
        return patches if self.max_patches is None else min(patches, self.max_patches)

    @property
    def smallest_image_patches(self) -> int:
        """A lower bound on the patches of an image: min_pixels, in tokens rounded down."""
        return max(self.min_pixels // self.pixels_per_token, 1) * self.merge_size**2

    def fit(
        self,
        h: int,
        w: int,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        min_image_tokens: int | None = None,
        max_image_tokens: int | None = None,
    ) -> Fit:
        """The canvas and the content of an h x w image. Bounds and errors are those of `prepare`."""
        return self._fit(h, w, self._bounds(min_pixels, max_pixels, min_image_tokens, max_image_tokens))

    def prepare(
        self,
        image: "Image.Image | bytes | np.ndarray",
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        min_image_tokens: int | None = None,
        max_image_tokens: int | None = None,
        spread: Spread = one_by_one,
    ) -> PreparedImage:
        """Decodes, resizes (bicubic) and cuts one image into patches.

        image: a PIL image, the bytes of a PNG, JPEG, WebP, GIF or BMP file, or an RGB uint8 array [height, width, 3],
        which must not change meanwhile.
        min_pixels, max_pixels, min_image_tokens, max_image_tokens: tighter bounds for this image, within the
        processor's own; each side in pixels or in tokens.
        spread: does the work on the decoded pixels in bands; the result is the same to the bit whichever way it does.
        Raises ImageError: unreadable, too many pixels, a shape the family's rule refuses, more patches than the largest
        bucket, bounds outside the processor's.
        """
        bounds = self._bounds(min_pixels, max_pixels, min_image_tokens, max_image_tokens)
        if isinstance(image, np.ndarray):
            # Not through Pillow, which holds a copy of four bytes a pixel.
            rgb = open_array(image, self.max_decoded_pixels)
            height, width = rgb.shape[:2]
        else:
            opened = open_image(image, self.max_decoded_pixels)
            # Before decoding, so that an image that cannot be used costs nothing.
            self._check_size(opened, bounds)
            rgb = upright_rgb(opened)
            width, height = rgb.size
        fit = self._fit(height, width, bounds)
        patches = self._patches(fit)
        self._check_patches(patches, height, width)
        rows, digest = resized_patches(rgb, fit, self.patch_size, self.merge_size, spread)
        key = hashlib.sha256(repr((self._settings(bounds), (width, height))).encode() + digest)
        grid = (1, fit.canvas[0] // self.patch_size, fit.canvas[1] // self.patch_size)
        return PreparedImage(rows, grid, key.digest(), patches // self.merge_size**2, (height, width))

    def _fit(self, h: int, w: int, bounds: tuple[int, int]) -> Fit:
        return self.rule.fit(h, w, self.factor, *self._one_frame(bounds))

    def _one_frame(self, bounds: tuple[int, int]) -> tuple[float, float]:
        # A half of an integer is exact, so that rounding stays that of the reference.
        return bounds[0] / self.counted_frames, bounds[1] / self.counted_frames

    def _patches(self, fit: Fit) -> int:
        return fit.canvas[0] * fit.canvas[1] // self.patch_size**2

    def _check_size(self, opened: Image.Image, bounds: tuple[int, int]) -> None:
        """Refuses by the header. Whether it lies on its side is not known yet, and a rule may count the two apart."""
        width, height = opened.size
        both = [self._patches(self._fit(*shape, bounds)) for shape in ((height, width), (width, height))]
        self._check_patches(min(both), height, width)

    def _check_patches(self, patches: int, height: int, width: int) -> None:
        if self.max_patches is not None and patches > self.max_patches:
            raise ImageError(
                f"image of {width}x{height} px needs {patches} patches; the limit is {self.max_patches}: send a "
                f"smaller image or set a smaller max_pixels"
            )

    def _bounds(
        self, min_pixels: int | None, max_pixels: int | None, min_tokens: int | None, max_tokens: int | None
    ) -> tuple[int, int]:
        """The bounds of one call in pixels, in the units of min_pixels and max_pixels."""
        least = self._bound("min", min_pixels, min_tokens, self.min_pixels)
        most = self._bound("max", max_pixels, max_tokens, self.max_pixels)
        if least > most:
            raise ImageError(
                f"the least size asked for is {least} pixels ({least / self.pixels_per_token:g} tokens) and the "
                f"largest {most} ({most / self.pixels_per_token:g}): the least must not be above the largest"
            )
        return least, most

    def _bound(self, side: str, pixels: int | None, tokens: int | None, default: int) -> int:
        if pixels is not None and tokens is not None:
            raise ImageError(f"{side}_pixels {pixels} and {side}_image_tokens {tokens} are both given; give one")
        if tokens is not None:
            _check_within(f"{side}_image_tokens", tokens, self.min_image_tokens, self.max_image_tokens)
            return tokens * self.pixels_per_token
        if pixels is not None:
            _check_within(f"{side}_pixels", pixels, self.min_pixels, self.max_pixels)
            return pixels
        return default

    def _settings(self, bounds: tuple[int, int]) -> tuple[object, ...]:
        return (
            self.rule.name,
            self.patch_size,
            self.merge_size,
            self.temporal_patch_size,
            bounds,
            self.mean,
            self.std,
        )


def _check_within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ImageError(f"{name} is {value}; images are prepared within {least} to {most} here: choose one of these")
