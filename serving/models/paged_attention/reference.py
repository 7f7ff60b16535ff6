"""Causal attention over a paged key-value cache, plain XLA: the oracle, and what runs where no kernel does."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Below any logit; finite, so that a row that has seen no key yet gives 0 and not NaN.
_FLOOR = -1e30


def paged_attention_reference(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P S K D"],
    v_pages: Float[Array, "P S K D"],
    lengths: Int[Array, " T"],
    tile_request: Int[Array, " G"],
    page_table: Int[Array, "R W"],
    kv_heads: Int[Array, " J"] | None = None,
    *,
    scale: float,
) -> Float[Array, "T H D"]:
    """softmax(scale * q k^T) v over the first lengths[t] tokens of each row's request. kv_heads: the key head of each
    run of H / J query heads, None for the K key heads in order.

    Pages are taken one at a time for all tiles together, with a running maximum and sum in float32. A tile that is done
    sees only masked pages, which are exact no-ops, so a row's result does not depend on what else is in the pass.
    """
    tiles, size = tile_request.shape[0], k_pages.shape[1]
    rows = q.shape[0] // tiles
    groups = k_pages.shape[2] if kv_heads is None else kv_heads.shape[0]
    q = q.reshape(tiles, rows, groups, -1, q.shape[-1])
    tables, limits = page_table[tile_request], lengths.reshape(tiles, rows)
    shape = q.shape[:4]

    def visit(page, carry):
        peak, total, acc = carry
        k, v = k_pages[tables[:, page]], v_pages[tables[:, page]]
        if kv_heads is not None:
            k, v = k[:, :, kv_heads], v[:, :, kv_heads]
        s = jnp.einsum("gtkrd,gskd->gtkrs", q, k, preferred_element_type=jnp.float32) * scale
        visible = page * size + jnp.arange(size) < limits[:, :, None]
        s = jnp.where(visible[:, :, None, None, :], s, -jnp.inf)
        # A weight of 0 does not silence a NaN: what no row of the tile may see must not be multiplied at all.
        v = jnp.where(visible.any(1)[:, :, None, None], v, 0)
        new_peak = jnp.maximum(peak, s.max(-1))
        shrink, p = jnp.exp(peak - new_peak), jnp.exp(s - new_peak[..., None])
        pv = jnp.einsum("gtkrs,gskd->gtkrd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_peak, total * shrink + p.sum(-1), acc * shrink[..., None] + pv

    start = (jnp.full(shape, _FLOOR), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    pages = (lengths.max() + size - 1) // size
    _, total, acc = lax.fori_loop(0, pages, visit, start)
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    return out.reshape(tiles * rows, -1, q.shape[-1]).astype(k_pages.dtype)
