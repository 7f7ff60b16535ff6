"""Attention over packed images: every patch sees the patches of its own image, or of its own window of that image, and
nothing else."""

from jaxtyping import Array, Float, Int

from vitbatch.attention.blockwise import attend_blockwise
from vitbatch.attention.windowed import attend_windowed
from vitbatch.lanes import Segments

__all__ = ["attend", "attend_windows"]


def attend(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C H D"],
    segments: Segments[Array],
    *,
    chunk: int,
) -> Float[Array, "C H D"]:
    """softmax(q k^T / sqrt(D)) v within each image of a lane; rows outside any image are 0.

    chunk: query blocks computed side by side (see `attend_blockwise`). Kernels, when there are any, are chosen here.
    """
    return attend_blockwise(q, k, v, segments, chunk=chunk)


def attend_windows(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C H D"],
    segments: Segments[Array],
    windows: Int[Array, "C"],
    *,
    window_patches: int,
    chunk: int,
) -> Float[Array, "C H D"]:
    """Like `attend`, within each window of an image. windows: an id a patch, -1 outside any image. The patches of a
    window stand side by side, `window_patches` of them at most.
    """
    return attend_windowed(q, k, v, segments, windows, window_patches=window_patches, chunk=chunk)
