"""The resize rule of GLM-5-Next: the picture keeps its shape and is padded to whole tokens, within a token budget.

+----------+--+   canvas: height and width rounded up to whole tokens
| content  | 0|   content: as given when the canvas is within the budget, scaled down when it is over it,
|          | 0|            scaled up when it is below the least
+----------+--+   the rest: raw 0, that is black before normalisation
| 0  0  0    0|
+-------------+
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from vitbatch.images.prepared import ImageError
from vitbatch.images.rules import Bounds, Fit, ResizeRule, read_count

# Transformers takes any strip, and squeezes the ones that do not fit out of shape. Wider than this is next to no
# picture: at the full budget of 8000 tokens a strip of this ratio is 79 pixels high.
MAX_ASPECT_RATIO = 1000

_DEFAULT_TOKENS = (16, 8000)


def _fit(h: int, w: int, factor: int, least: int | float, most: int | float) -> Fit:
    """Source: transformers' GLM-5-Next image processor, Pillow backend, which ignores patch_expand_factor."""
    if max(h, w) > MAX_ASPECT_RATIO * min(h, w):
        ratio = max(h, w) / min(h, w)
        raise ImageError(f"image of {w}x{h} px: aspect ratio {ratio:g} is over {MAX_ASPECT_RATIO}; crop it")
    canvas = _whole(h, factor), _whole(w, factor)
    if canvas[0] * canvas[1] < least:
        grow = math.sqrt(least / (h * w))
        canvas = _whole(math.ceil(h * grow), factor), _whole(math.ceil(w * grow), factor)
    if canvas[0] * canvas[1] > most:
        canvas = _largest_within(h, w, factor, most)
    scale = min(canvas[0] / h, canvas[1] / w)
    if h * w >= least:
        scale = min(1.0, scale)
    content = min(canvas[0], math.floor(h * scale)), min(canvas[1], math.floor(w * scale))
    if min(content) < 1:
        raise ImageError(
            f"image of {w}x{h} px: its shorter side vanishes within {math.floor(most) // factor**2} tokens; crop it or "
            f"allow more tokens"
        )
    return Fit(canvas, content)


def _whole(side: int, factor: int) -> int:
    return -(-side // factor) * factor


def _largest_within(h: int, w: int, factor: int, most: int | float) -> tuple[int, int]:
    """The canvas of the highest content, width in proportion and at least 1, that is within `most` pixels; one token
    where none is, which leaves no room for the shorter side."""

    def canvas(height: int) -> tuple[int, int]:
        return _whole(height, factor), _whole(max(1, math.floor(w * height / h)), factor)

    best = bisect_right(range(1, h + 1), most, key=lambda height: math.prod(canvas(height)))
    return canvas(best) if best else (factor, factor)


def _largest_canvas(factor: int, least: int | float, most: int | float) -> int:
    return math.floor(most) // factor**2 * factor**2


def _read_bounds(settings: Mapping[str, Any], pixels_per_token: int) -> Bounds:
    names = zip(("min_image_tokens", "max_image_tokens"), _DEFAULT_TOKENS, strict=True)
    least, most = ((read_count(settings, name) or default) * pixels_per_token for name, default in names)
    return least, most


RULE = ResizeRule("glm5_next", _fit, _largest_canvas, _read_bounds)
