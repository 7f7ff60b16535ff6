"""Index scores: score(m, n) = sum_h gates[m, h] * relu(q[m, h] . keys[n]), times key_scales[n] where given.

The two entry points differ in where the keys lie. On one platform both go through the same tile, so both give the same
bits: a kernel on a GPU where it takes the shapes, plain XLA elsewhere.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from dsa_indexer.rows import pad_rows
from dsa_indexer.scores import reference
from dsa_indexer.scores.reference import KEY_BLOCK, ROW_TILE, columns_of
from dsa_indexer.scores.triton import paged_scores_triton, row_scores_triton, takes
from vitstripe.platform import Platform, default_platform

__all__ = ["KEY_BLOCK", "ROW_TILE", "columns_of", "paged_scores", "row_scores"]


def _tiles(x: Array) -> Array:
    return x.reshape(-1, ROW_TILE, *x.shape[1:])


@jax.named_scope("score")
def row_scores(
    q: Float[Array, "M H D"],
    gates: Float32[Array, "M H"],
    keys: Float[Array, "N D"],
    key_scales: Float32[Array, "N"] | None,
    ks: Int32[Array, "M"],
    lengths: Int32[Array, "M"],
    *,
    platform: Platform | None = None,
) -> Float32[Array, "M N"]:
    """Scores of M rows (a multiple of ROW_TILE) against N contiguous keys.

    Columns outside a row's window hold anything. platform: what it is compiled for, None for the first device.
    """
    platform = platform or default_platform()
    if takes(q, keys, platform):
        return row_scores_triton(q, gates, keys, key_scales, ks, lengths, platform=platform)
    num_keys = keys.shape[0]
    columns = columns_of(num_keys)
    keys = pad_rows(keys, columns)
    key_scales = None if key_scales is None else pad_rows(key_scales, columns)

    def load_block(j: Int32[Array, ""]) -> reference.Block:
        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, j * KEY_BLOCK, KEY_BLOCK)

        return cut(keys), None if key_scales is None else cut(key_scales)

    def tile(parts: tuple[Array, Array, Array, Array]) -> Float32[Array, "8 columns"]:
        tile_q, tile_gates, tile_ks, tile_lengths = parts
        return reference.tile_scores(tile_q, tile_gates, tile_ks, tile_lengths, load_block, columns)

    out = lax.map(tile, (_tiles(q), _tiles(gates), _tiles(ks), _tiles(lengths)))
    return out.reshape(-1, columns)[:, :num_keys]


@jax.named_scope("score")
def paged_scores(
    q: Float[Array, "B n H D"],
    gates: Float32[Array, "B n H"],
    key_pages: Float[Array, "P page D"],
    scale_pages: Float32[Array, "P page"] | None,
    page_table: Int32[Array, "B maxpages"],
    lengths: Int32[Array, "B n"],
    *,
    platform: Platform | None = None,
) -> Float32[Array, "B n N"]:
    """Scores of n rows a request against that request's paged keys, N = maxpages * page.

    Row i of request b sees the first lengths[b, i] of them; the columns after those hold anything, and so may the
    entries of page_table. platform: what it is compiled for, None for the first device.
    """
    platform = platform or default_platform()
    if takes(q, key_pages, platform):
        return paged_scores_triton(q, gates, key_pages, scale_pages, page_table, lengths, platform=platform)

    def one(request: tuple[Array, Array, Array, Array]) -> Float32[Array, "n N"]:
        q, gates, pages, lengths = request
        return _paged_scores_of_one(q, gates, key_pages, scale_pages, pages, lengths)

    return lax.map(one, (q, gates, page_table, lengths))


def _paged_scores_of_one(
    q: Float[Array, "n H D"],
    gates: Float32[Array, "n H"],
    key_pages: Float[Array, "P page D"],
    scale_pages: Float32[Array, "P page"] | None,
    pages: Int32[Array, "maxpages"],
    lengths: Int32[Array, "n"],
) -> Float32[Array, "n N"]:
    num_pages, page_size, dim = key_pages.shape
    num_keys = pages.shape[0] * page_size
    columns = columns_of(num_keys)
    slots = key_pages.reshape(num_pages * page_size, dim)
    scales = None if scale_pages is None else scale_pages.reshape(-1)
    num_rows = q.shape[0]
    padded = -(-num_rows // ROW_TILE) * ROW_TILE
    q, gates, lengths = (pad_rows(x, padded) for x in (q, gates, lengths))

    def load_block(j: Int32[Array, ""]) -> reference.Block:
        position = j * KEY_BLOCK + jnp.arange(KEY_BLOCK, dtype=jnp.int32)
        page = pages.at[position // page_size].get(mode="clip")
        # Positions past the request's keys read some page or other; the row's window masks them.
        slot = page * page_size + position % page_size
        return slots.at[slot].get(mode="clip"), None if scales is None else scales.at[slot].get(mode="clip")

    def tile(parts: tuple[Array, Array, Array]) -> Float32[Array, "8 columns"]:
        tile_q, tile_gates, tile_lengths = parts
        return reference.tile_scores(
            tile_q, tile_gates, jnp.zeros_like(tile_lengths), tile_lengths, load_block, columns
        )

    out = lax.map(tile, (_tiles(q), _tiles(gates), _tiles(lengths)))
    return out.reshape(-1, columns)[:num_rows, :num_keys]
