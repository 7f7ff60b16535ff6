"""Sinkhorn normalisation of small matrices, one a token."""

import jax
from jaxtyping import Array, Float32

from serving.models.sinkhorn import reference
from serving.models.sinkhorn.triton import LARGEST_STREAMS, sinkhorn_triton
from vitstripe.platform import Platform, default_platform

__all__ = ["sinkhorn"]


@jax.named_scope("sinkhorn")
def sinkhorn(
    logits: Float32[Array, "T N N"], *, iterations: int, eps: float, platform: Platform | None = None
) -> Float32[Array, "T N N"]:
    """softmax of each row plus eps; then columns and rows divided by their sums plus eps, in turn.

    Columns come first and last: 2 * iterations - 1 divisions. So columns sum to 1, and rows only nearly: the model was
    trained with this many steps, not with the limit. platform: what it is compiled for, None for the first device; on a
    GPU a kernel keeps the matrices in registers, where plain XLA would launch a kernel or two for every division.
    """
    platform = platform or default_platform()
    if platform.runs_kernels and logits.shape[-1] <= LARGEST_STREAMS:
        return sinkhorn_triton(logits, iterations=iterations, eps=eps)
    return reference.sinkhorn(logits, iterations=iterations, eps=eps)
