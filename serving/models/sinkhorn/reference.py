"""Sinkhorn normalisation in plain XLA."""

import jax
from jax import lax
from jaxtyping import Array, Float32


def sinkhorn(logits: Float32[Array, "T N N"], *, iterations: int, eps: float) -> Float32[Array, "T N N"]:
    """See `serving.models.sinkhorn.sinkhorn`."""

    def divide(c: Array, axis: int) -> Array:
        return c / (c.sum(axis, keepdims=True) + eps)

    c = divide(jax.nn.softmax(logits, -1) + eps, 1)
    return lax.fori_loop(0, iterations - 1, lambda _, c: divide(divide(c, 2), 1), c)
