"""Latent attention over selected keys in plain XLA: gather, softmax, weighted sum, a block of rows at a time."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from dsa_indexer.sparse_mla.latents import LatentRows


def attend_block(
    q: Float[Array, "b H C"],
    kv: Float[Array, "slots C"] | LatentRows,
    indices: Int32[Array, "b K"],
    scale: float,
    value_dim: int,
) -> Float[Array, "b H V"]:
    """One block of rows. float32 softmax, products in kv's dtype with float32 accumulation.

    float8 latents are multiplied in q's dtype, which holds them exactly; for float16 queries in float32, because their
    scales make weights too small for float16."""
    is_float8 = isinstance(kv, LatentRows)
    if is_float8:
        slots, dtype = kv.values.shape[0], jnp.float32 if q.dtype == jnp.float16 else q.dtype
    else:
        slots, dtype = kv.shape[0], kv.dtype
    precision = lax.Precision.HIGHEST if jnp.float32 in (q.dtype, dtype) else None
    valid = (indices >= 0) & (indices < slots)

    def gathered(rows: Array) -> Array:
        # Zeroed, not just masked: slot 0 stands in for -1, and 0 * NaN would spread from a row nobody selected.
        found = rows.at[jnp.where(valid, indices, 0)].get(mode="clip")
        return jnp.where(valid.reshape(*valid.shape, *[1] * (rows.ndim - 1)), found, 0)

    def product(x: Array, y: Array, over: int) -> Array:
        dims = (((2,), (over,)), ((0,), (0,)))
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    if is_float8:
        latents, scales = gathered(kv.values).astype(dtype), gathered(kv.scales)[:, None, :]
        scores = product(q[..., :value_dim].astype(dtype), latents, 2) * scales
        if kv.rest is not None:
            scores += product(q[..., value_dim:].astype(dtype), gathered(kv.rest).astype(dtype), 2)
    else:
        chosen, scales = gathered(kv), 1
        latents, scores = chosen[:, :, :value_dim], product(q, chosen, 2)
    valid = valid[:, None, :]
    scores = jnp.where(valid, scores * scale, -jnp.inf)
    # A row with no key has a maximum of -inf; 0 in its place makes exp(-inf) = 0 instead of NaN.
    top = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.any(valid, -1, keepdims=True), top, 0))
    total = weights.sum(-1, keepdims=True)
    values = product((weights * scales).astype(dtype), latents, 1)
    return (values / jnp.where(total == 0, 1, total)).astype(q.dtype)
