"""Latent attention over selected keys in plain XLA: gather, softmax, weighted sum, a block of rows at a time."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def attend_block(
    q: Float[Array, "b H C"], kv: Float[Array, "slots C"], indices: Int32[Array, "b K"], scale: float, value_dim: int
) -> Float[Array, "b H V"]:
    """One block of rows. float32 softmax, products in kv's dtype with float32 accumulation."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    valid = (indices >= 0) & (indices < kv.shape[0])
    # Zeroed, not just masked: slot 0 stands in for -1, and 0 * NaN would spread from a row nobody selected.
    chosen = jnp.where(valid[:, :, None], kv.at[jnp.where(valid, indices, 0)].get(mode="clip"), 0)
    scores = lax.dot_general(
        q, chosen, (((2,), (2,)), ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32
    )
    valid = valid[:, None, :]
    scores = jnp.where(valid, scores * scale, -jnp.inf)
    # A row with no key has a maximum of -inf; 0 in its place makes exp(-inf) = 0 instead of NaN.
    top = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.any(valid, -1, keepdims=True), top, 0))
    total = weights.sum(-1, keepdims=True)
    values = lax.dot_general(
        weights.astype(kv.dtype),
        chosen[:, :, :value_dim],
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (values / jnp.where(total == 0, 1, total)).astype(q.dtype)
