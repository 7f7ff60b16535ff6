"""What a resize rule is. One module a family beside this one holds its rule; settings.py finds it by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

Bounds = tuple[int | None, int | None]


@dataclass(frozen=True)
class Fit:
    """canvas: (height, width) that is cut into patches. content: (height, width) the picture is resized to; it lies in
    the canvas's upper left corner, and the rest is zero."""

    canvas: tuple[int, int]
    content: tuple[int, int]


@dataclass(frozen=True)
class ResizeRule:
    """How one kind of image processor sizes an image.

    name: part of every key. fit: (height, width, factor, least, most) -> Fit; both sides of the canvas are multiples
    of `factor`, the bounds are pixels of one frame's canvas; raises ImageError for a shape the rule does not take.
    largest_canvas: (factor, least, most) -> upper bound on the pixels of any canvas.
    read_bounds: (parsed preprocessor_config.json, pixels a token) -> its bounds, None where it states none.
    counts_frames: whether bounds count the pixels of all the frames a patch spans, and not of one.
    """

    name: str
    fit: Callable[[int, int, int, int | float, int | float], Fit]
    largest_canvas: Callable[[int, int | float, int | float], int]
    read_bounds: Callable[[Mapping[str, Any], int], Bounds]
    counts_frames: bool = False


def read_count(values: Mapping[str, Any], name: str) -> int | None:
    """A positive whole number of preprocessor_config.json, None where it is absent; raises ValueError for others."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
        raise ValueError(f"preprocessor: {name} is {value!r}; it must be a positive whole number")
    return int(value)


def read_size(settings: Mapping[str, Any], default: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `size` of preprocessor_config.json; raises ValueError where it is no object."""
    size = settings.get("size") or default
    if not isinstance(size, Mapping):
        raise ValueError(f"preprocessor: size is {size!r}; it must hold shortest_edge and longest_edge")
    return size


def edges(size: Mapping[str, Any]) -> Bounds:
    """The bounds in a `size`, which counts pixels of area whatever its names say."""
    return read_count(size, "shortest_edge"), read_count(size, "longest_edge")
