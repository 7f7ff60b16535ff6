"""The Walsh-Hadamard rotation of index queries and keys.

It is orthogonal, so scores stay what they were, and it spreads a vector's energy over all its channels, so that one
scale a vector loses less in float8. Queries and keys must both have it or neither.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def require_power_of_two(dim: int) -> None:
    """Raises ValueError unless a Sylvester matrix of this size exists."""
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"a Hadamard rotation of {dim} dimensions does not exist here; it must be a power of two")


def hadamard(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """x times the Sylvester matrix of D rows over sqrt(D). float32 inside, in x's dtype. Its own inverse.

    log2(D) rounds of sums and differences rather than a matmul, so the bits of a vector depend on that vector alone.
    Raises ValueError if D is not a power of two.
    """
    dim = x.shape[-1]
    require_power_of_two(dim)
    h = x.astype(jnp.float32)
    half = 1
    while half < dim:
        pairs = h.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        h = jnp.stack([a + b, a - b], -2).reshape(x.shape)
        half *= 2
    return (h * dim**-0.5).astype(x.dtype)
