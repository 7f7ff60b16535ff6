"""Attention over packed images: every patch sees the patches of its own image, or of its own window of that image, and
nothing else."""

import jax
from jaxtyping import Array, Float, Int

from vitbatch.attention.blocks import block_size
from vitbatch.attention.blockwise import attend_blockwise
from vitbatch.attention.tiny import attend_tiny
from vitbatch.attention.triton import attend_triton, attend_windows_triton, kernel_serves
from vitbatch.attention.windowed import attend_windowed
from vitbatch.config import TINY_BLOCK
from vitbatch.lanes import Segments
from vitstripe.platform import Platform, default_platform

__all__ = ["attend", "attend_windows"]


@jax.named_scope("attend")
def attend(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C G D"],
    segments: Segments[Array],
    *,
    platform: Platform | None = None,
) -> Float[Array, "C H D"]:
    """softmax(q k^T / sqrt(D)) v within each image of a lane; rows outside any image are 0. v: the values are its last
    H heads, so that a fused projection of queries, keys and values can be given as it is.

    The kernel on a GPU in bfloat16 with head dimensions that are multiples of 8 from 16 to 128, otherwise, and in tiny
    lanes, plain XLA. platform: what it is compiled for; None is the first device's.
    """
    platform = platform or default_platform()
    if _is_tiny(q, segments):
        return attend_tiny(q, k, v[:, -q.shape[1] :], segments, chunk=_tiny_chunk(platform))
    if kernel_serves(q, platform):
        return attend_triton(q, k, v, segments, platform=platform)
    return attend_blockwise(q, k, v[:, -q.shape[1] :], segments, chunk=_chunk(platform))


@jax.named_scope("attend")
def attend_windows(
    q: Float[Array, "C H D"],
    k: Float[Array, "C H D"],
    v: Float[Array, "C G D"],
    segments: Segments[Array],
    windows: Int[Array, "C"],
    *,
    window_patches: int,
    platform: Platform | None = None,
) -> Float[Array, "C H D"]:
    """Like `attend`, within each window of an image. windows: an id a patch, -1 outside any image. The patches of a
    window stand side by side, `window_patches` of them at most.
    """
    platform = platform or default_platform()
    if _is_tiny(q, segments):
        return attend_tiny(q, k, v[:, -q.shape[1] :], segments, windows, chunk=_tiny_chunk(platform))
    if kernel_serves(q, platform):
        return attend_windows_triton(q, k, v, segments, windows, window_patches=window_patches, platform=platform)
    return attend_windowed(
        q, k, v[:, -q.shape[1] :], segments, windows, window_patches=window_patches, chunk=_chunk(platform)
    )


def _is_tiny(q: Float[Array, "C H D"], segments: Segments[Array]) -> bool:
    return block_size(q.shape[0], segments.first.shape[0]) == TINY_BLOCK


def _tiny_chunk(platform: Platform) -> int | None:
    """Images a step: a CPU saves what it does not compute, a GPU rather computes all places than wait for a loop."""
    return 8 if platform.kind == "cpu" else None


def _chunk(platform: Platform) -> int:
    """Query blocks that plain XLA computes side by side: a CPU gains nothing from more, a GPU needs many to be full."""
    return 8 if platform.kind == "cpu" else 64
