"""The resize rule of Qwen2-VL's image processor, which every Qwen vision-language model after it kept."""

import math
from collections.abc import Mapping
from typing import Any

from vitbatch.images.prepared import ImageError
from vitbatch.images.rules import Bounds, Fit, ResizeRule, edges, read_count, read_size

MAX_ASPECT_RATIO = 200

_DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


def smart_resize(h: int, w: int, *, factor: int, min_pixels: int | float, max_pixels: int | float) -> tuple[int, int]:
    """The canvas (height, width) of an h x w image in Qwen's rule: both sides multiples of `factor`, the area within
    [min_pixels, max_pixels] where rounding allows, the aspect ratio nearly kept.

    Raises ImageError above an aspect ratio of 200. Source: transformers' Qwen2-VL image processor.
    """
    if max(h, w) > MAX_ASPECT_RATIO * min(h, w):
        ratio = max(h, w) / min(h, w)
        raise ImageError(f"image of {w}x{h} px: aspect ratio {ratio:g} is over {MAX_ASPECT_RATIO}; crop it")
    return nearest_canvas(h, w, factor, min_pixels, max_pixels)


def nearest_canvas(h: int, w: int, factor: int, least: int | float, most: int | float) -> tuple[int, int]:
    """`smart_resize` for a shape whose aspect ratio has been checked."""
    height, width = round(h / factor) * factor, round(w / factor) * factor
    if height * width > most:
        shrink = math.sqrt(h * w / most)
        height = max(factor, math.floor(h / shrink / factor) * factor)
        width = max(factor, math.floor(w / shrink / factor) * factor)
    elif height * width < least:
        grow = math.sqrt(least / (h * w))
        height, width = math.ceil(h * grow / factor) * factor, math.ceil(w * grow / factor) * factor
    return height, width


def largest_canvas(factor: int, min_pixels: int | float, max_pixels: int | float) -> int:
    """An upper bound on the pixels of any canvas of `smart_resize`.

    Thin strips may exceed max_pixels: shrinking does not cut the short side below `factor`, and growing rounds both
    sides up, by less than `factor` each.
    """
    stretch = math.sqrt(MAX_ASPECT_RATIO)
    shrunk = factor * math.floor(stretch * math.sqrt(max_pixels) / factor)
    side = math.sqrt(min_pixels) / factor
    grown = math.floor((side / stretch + 1) * (side * stretch + 1))
    return max(math.floor(max_pixels), shrunk * factor, grown * factor**2)


def _fit(h: int, w: int, factor: int, least: int | float, most: int | float) -> Fit:
    canvas = smart_resize(h, w, factor=factor, min_pixels=least, max_pixels=most)
    return Fit(canvas, canvas)


def _read_bounds(settings: Mapping[str, Any], pixels_per_token: int) -> Bounds:
    # Files of before `size` name the bounds themselves, at the top or inside `size`.
    size = read_size(settings, _DEFAULT_SIZE)
    least, most = edges(size)
    return (
        read_count(settings, "min_pixels") or least or read_count(size, "min_pixels"),
        read_count(settings, "max_pixels") or most or read_count(size, "max_pixels"),
    )


RULE = ResizeRule("qwen", _fit, largest_canvas, _read_bounds)
