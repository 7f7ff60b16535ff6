"""The resize rule of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: Qwen's, with bounds that count both frames of a patch,
after a picture with a side below one token has been scaled up."""

from collections.abc import Mapping
from typing import Any

from vitbatch.images.prepared import ImageError
from vitbatch.images.qwen import MAX_ASPECT_RATIO, largest_canvas, nearest_canvas
from vitbatch.images.rules import Bounds, Fit, ResizeRule, edges, read_size

_DEFAULT_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}


def _fit(h: int, w: int, factor: int, least: int | float, most: int | float) -> Fit:
    """Source: transformers' GLM-4V image processor. The aspect ratio is that of the picture scaled up."""
    height, width = h, w
    if min(h, w) < factor:
        scale = max(factor / h, factor / w)
        height, width = int(h * scale), int(w * scale)
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        ratio = max(height, width) / min(height, width)
        scaled = "" if (height, width) == (h, w) else f", scaled up to {width}x{height} px"
        raise ImageError(f"image of {w}x{h} px{scaled}: aspect ratio {ratio:g} is over {MAX_ASPECT_RATIO}; crop it")
    canvas = nearest_canvas(height, width, factor, least, most)
    return Fit(canvas, canvas)


def _read_bounds(settings: Mapping[str, Any], pixels_per_token: int) -> Bounds:
    return edges(read_size(settings, _DEFAULT_SIZE))


RULE = ResizeRule("glm4v", _fit, largest_canvas, _read_bounds, counts_frames=True)
