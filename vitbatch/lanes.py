"""What a device knows of the images in its lane, besides their pixels. All of it is planned on the host.

A lane of C patches is B blocks of 64 patches, or of 4 in a tiny lane, whose images have at most 64. An image takes
whole blocks; its last one may be partly padding:

    patch   0        64       128      192      256
            | image a (100)   | image b | padding |
    first   0        0        2         3            block where the image of this block begins
    end     100      100      192       0            patch where it ends; 0 for a block of padding

The containers hold numpy arrays on the host, jax arrays in a program and ShapeDtypeStructs when one is lowered.
Everywhere but inside a tower every array has one more axis, the lanes, in front.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from jax.tree_util import register_dataclass

A = TypeVar("A")


@register_dataclass
@dataclass(frozen=True)
class Segments(Generic[A]):
    """first: int32 [B], block in which the image of each block begins. end: int32 [B], patch where it ends, 0 for
    padding."""

    first: A
    end: A


@register_dataclass
@dataclass(frozen=True)
class Windows(Generic[A]):
    """How a tower with window attention reorders the merged cells of a lane, G = C / merge_size^2 of them. Each image
    keeps its own stretch of the lane; inside it, cells stand window by window.

    order: int32 [G], the cell that stands at each place. place: int32 [G], its inverse. window: int32 [G], where the
    window of each place begins; -1 for padding.
    """

    order: A
    place: A
    window: A


@register_dataclass
@dataclass(frozen=True)
class LaneInputs(Generic[A]):
    """positions: int32 [C, 2], row and column of each patch in its image.
    tap_index, tap_weight: int32 and float32 [C, taps], rows of the position table and their weights; 0 taps without a
    table. segments: which blocks belong together. windows: None for a tower without window attention."""

    positions: A
    tap_index: A
    tap_weight: A
    segments: Segments[A]
    windows: Windows[A] | None = None
