"""Attention over the selected keys: multi-head latent attention in its absorbed form."""

import jax
from jaxtyping import Array, Float, Int32

from dsa_indexer.chunks import map_chunks
from dsa_indexer.sparse_mla import reference
from dsa_indexer.sparse_mla.triton import sparse_mla_triton, takes
from vitstripe.platform import Platform, default_platform

__all__ = ["sparse_mla"]


@jax.named_scope("attend")
def sparse_mla(
    q: Float[Array, "T H C"],
    kv: Float[Array, "slots C"],
    indices: Int32[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
    row_block: int = 16,
    platform: Platform | None = None,
) -> Float[Array, "T H V"]:
    """Each row attends to its selected slots of the latent cache, shared by all heads.

        o[t, h] = sum_j softmax_j(scale * q[t, h] . kv[j]) * kv[j, :value_dim],   j over indices[t]

    q: [latent part, absorbed | rotary part], C = kv_lora_rank + rope. kv: [normed latent | rotated key], a row a slot.
    indices: physical slots; -1 (or past the end of kv) is no key. A row without keys gives 0. Causality is in the
    indices. A slot must not be named twice in a row.
    scale: of the softmax, (nope + rope)^-0.5 before absorption. value_dim: kv_lora_rank.
    row_block: rows gathered at once by plain XLA; memory is row_block * K * C elements of kv, whatever T is.
    platform: what it is compiled for, None for the first device. On a GPU a kernel runs for q and kv of one 16-bit
    dtype; it gathers into registers and shared memory alone.
    Raises ValueError for a row_block below 1 or a value_dim outside [1, C].
    """
    if row_block < 1:
        raise ValueError(f"row_block is {row_block}; it must be at least 1")
    if not 1 <= value_dim <= kv.shape[1]:
        raise ValueError(f"value_dim is {value_dim}; it must be between 1 and the width of kv, {kv.shape[1]}")
    platform = platform or default_platform()
    if takes(q, kv, indices, value_dim, platform):
        return sparse_mla_triton(q, kv, indices, scale=scale, value_dim=value_dim, platform=platform)

    def block(q: Array, indices: Array) -> Array:
        return reference.attend_block(q, kv, indices, scale, value_dim)

    return map_chunks(block, min(row_block, max(q.shape[0], 1)), q, indices)
