"""Causal attention over a paged key-value cache with grouped queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from serving.models.paged_attention.reference import paged_attention_reference
from serving.models.paged_attention.triton import paged_attention_triton, serves
from vitstripe.platform import Platform, default_platform

__all__ = ["paged_attention"]


@jax.named_scope("attend")
def paged_attention(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P S K D"],
    v_pages: Float[Array, "P S K D"],
    lengths: Int[Array, " T"],
    tile_request: Int[Array, " G"],
    page_table: Int[Array, "R W"],
    *,
    scale: float,
    kv_heads: Int[Array, " J"] | None = None,
    platform: Platform | None = None,
) -> Float[Array, "T H D"]:
    """softmax(scale * q k^T) v over the first lengths[t] tokens of each row's request; a row of length 0 gives 0.

    tile_request: the row of page_table that T / G rows side by side read; one row a tile is a decode.
    Grouped queries: query head h reads key head h // (H / K). Where key heads are replicated over the mesh and query
    heads are not, kv_heads names the key head of each run of H / J local query heads.
    A row's result depends on its own request alone, not on what else is in the pass.
    platform: what it is compiled for, None for the first device. A kernel runs on CUDA and ROCm for head dimensions of
    64, 128 and 256 in bfloat16 or float16, plain XLA elsewhere.
    """
    platform = platform or default_platform()
    args = (q, k_pages, v_pages, lengths, tile_request, page_table)
    groups = k_pages.shape[2] if kv_heads is None else kv_heads.shape[0]
    if not serves(q, k_pages, tile_request, groups, platform):
        return paged_attention_reference(*args, kv_heads, scale=scale)
    if kv_heads is None:
        kv_heads = jnp.arange(groups, dtype=jnp.int32)
    return paged_attention_triton(*args, kv_heads, scale=scale, platform=platform)
