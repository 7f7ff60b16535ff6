"""A matrix product whose rows belong to groups, each with a matrix of its own: the experts of a mixture."""

import jax
from jaxtyping import Array, Float, Int

from serving.models.grouped_matmul.reference import grouped_matmul_reference
from serving.models.grouped_matmul.triton import grouped_matmul_triton, serves
from vitstripe.platform import Platform, default_platform

__all__ = ["grouped_matmul"]


@jax.named_scope("experts")
def grouped_matmul(
    x: Float[Array, "T I"],
    weights: Float[Array, "E O I"],
    sizes: Int[Array, " E"],
    rows: Int[Array, " M"],
    *,
    spread: int | None = None,
    platform: Platform | None = None,
) -> Float[Array, "M O"]:
    """x[rows[m]] @ weights[e]^T for the expert e that m belongs to, accumulated in float32, in x's dtype.

    The numbers in `rows` lie expert by expert, sizes[e] of each; those left at the end belong to none, cost next to
    nothing in the kernel, and come out as anything, a NaN too. spread: the experts among which rows are dealt, those of
    other devices too, None for E; it tells what tile a typical expert fills. platform: what it is compiled for, None
    for the first device. A kernel runs on CUDA and ROCm in bfloat16 or float16 where weights and results have less than
    2^31 elements; elsewhere lax.ragged_dot, for which XLA may multiply every row by every matrix.
    """
    platform = platform or default_platform()
    if serves(x, weights, rows.shape[0], platform):
        return grouped_matmul_triton(x, weights, sizes, rows, spread=spread, platform=platform)
    return grouped_matmul_reference(x, weights, sizes, rows)
