"""Attention over packed images: every patch sees the patches of its own image and nothing else."""

from jaxtyping import Array, Float

from vitbatch.attention.blockwise import attend_blockwise
from vitbatch.lanes import Segments

__all__ = ["attend"]


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
