"""What goes into an encoder's calls, and what is told about them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Frame:
    """What a call encodes: patch rows (uint8 pixels of one frame, or normalised floats) and their (gh, gw) grid."""

    rows: np.ndarray
    grid: tuple[int, int]


@dataclass(frozen=True)
class CallStats:
    """One encoder call. call_id: running number from 1. bucket: patches a lane. patches: real ones.
    padded_ratio: share of the computed patches that are padding. imbalance: patches of the fullest lane over the mean.
    seconds: from dispatch until its rows were ready."""

    call_id: int
    images: int
    lanes: int
    lanes_filled: int
    bucket: int
    patches: int
    padded_ratio: float
    imbalance: float
    seconds: float


@dataclass(frozen=True)
class EncodedImages:
    """Where the rows of the given images are in the pool, in the order given.

    slots: int32 [tokens] an image. calls: the encoder calls that ran. call_of: index into `calls` of the one that
    encoded each image, None where the rows were there already.
    """

    slots: list[np.ndarray]
    calls: list[CallStats]
    call_of: list[int | None]

    @property
    def padded_ratio(self) -> float:
        """Share of the patches computed by all the calls that are padding; 0 without a call."""
        computed = sum(call.lanes * call.bucket for call in self.calls)
        return 1 - sum(call.patches for call in self.calls) / computed if computed else 0.0
