"""The grouped product as plain XLA."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def grouped_matmul_reference(
    x: Float[Array, "T I"], weights: Float[Array, "E O I"], sizes: Int[Array, " E"], rows: Int[Array, " M"]
) -> Float[Array, "M O"]:
    """See `grouped_matmul`."""
    transposed = jnp.swapaxes(weights, 1, 2)
    return lax.ragged_dot(x[rows], transposed, sizes, preferred_element_type=jnp.float32).astype(x.dtype)
