"""Attention over the selected keys: multi-head latent attention in its absorbed form."""

import jax
from jaxtyping import Array, Float, Int32

from dsa_indexer.chunks import map_chunks
from dsa_indexer.sparse_mla import reference
from dsa_indexer.sparse_mla.latents import LatentRows, encode_latents
from dsa_indexer.sparse_mla.triton import sparse_mla_triton, takes
from vitstripe.platform import Platform, default_platform

__all__ = ["LatentRows", "encode_latents", "sparse_mla"]


@jax.named_scope("attend")
def sparse_mla(
    q: Float[Array, "T H C"],
    kv: Float[Array, "slots C"] | LatentRows,
    indices: Int32[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
    row_block: int = 16,
    platform: Platform | None = None,
) -> Float[Array, "T H V"]:
    """Each row attends to its selected slots of the latent cache, shared by all heads.

        o[t, h] = sum_j softmax_j(scale * q[t, h] . kv[j]) * kv[j, :value_dim],   j over indices[t]

    q: [latent part, absorbed | rotary part], C = kv_lora_rank + rope. kv: [normed latent | rotated key], a row a slot;
    or the same with float8 latents, whose scales then multiply scores and weights, and never a latent.
    indices: physical slots; -1 (or past the end of kv) is no key. A row without keys gives 0. Causality is in the
    indices. A slot must not be named twice in a row.
    scale: of the softmax, (nope + rope)^-0.5 before absorption. value_dim: kv_lora_rank.
    row_block: rows gathered at once by plain XLA; memory is row_block * K * C elements of kv, whatever T is.
    platform: what it is compiled for, None for the first device. On a GPU a kernel runs for q and kv of one 16-bit
    dtype, and for bfloat16 q with latents in the architecture's float8; it gathers into registers and shared memory
    alone.
    Raises ValueError for a row_block below 1, a value_dim outside [1, C] or other than the width of float8 latents, and
    latents whose parts do not fit together.
    """
    if row_block < 1:
        raise ValueError(f"row_block is {row_block}; it must be at least 1")
    if isinstance(kv, LatentRows):
        _require_parts(q, kv, value_dim)
    elif not 1 <= value_dim <= kv.shape[1]:
        raise ValueError(f"value_dim is {value_dim}; it must be between 1 and the width of kv, {kv.shape[1]}")
    platform = platform or default_platform()
    if takes(q, kv, indices, value_dim, platform):
        return sparse_mla_triton(q, kv, indices, scale=scale, value_dim=value_dim, platform=platform)

    def block(q: Array, indices: Array) -> Array:
        return reference.attend_block(q, kv, indices, scale, value_dim)

    return map_chunks(block, min(row_block, max(q.shape[0], 1)), q, indices)


def _require_parts(q: Array, kv: LatentRows, value_dim: int) -> None:
    values, scales, rest = kv.values, kv.scales, kv.rest
    if values.dtype.itemsize != 1 or scales.shape != values.shape[:1]:
        raise ValueError(
            f"LatentRows has values {values.dtype}{list(values.shape)} and scales {scales.dtype}{list(scales.shape)}; "
            f"it is for float8 values with one scale a row (`encode_latents`); pass others as one array"
        )
    if rest is not None and (rest.shape[0] != values.shape[0] or rest.dtype != q.dtype):
        raise ValueError(
            f"LatentRows.rest is {rest.dtype}{list(rest.shape)}; it must be {q.dtype}, as q is, in {values.shape[0]} "
            f"rows, as values are"
        )
    if value_dim != values.shape[1] or kv.width != q.shape[2]:
        raise ValueError(
            f"value_dim is {value_dim} and q has {q.shape[2]} columns; LatentRows has {values.shape[1]} columns of "
            f"values and {kv.width} in all"
        )
