"""The grouped product as a kernel: Pallas through Triton, the backend that reaches AMD as well as NVIDIA.

Each expert's places are cut in tiles that start at its first; the last one may be short. How many there are is known on
the device alone, so the grid has as many as there could be, and those past the last do nothing. A tile loads the rows
that its places name, wherever they lie.

    place     0 . . . 3 | 4 . . . 7 | 8 . 9 | 10 . 11 | 12 . . .
    expert    0         | 0         | 0     | 2       | none
    tile      0           1           2       3         4, 5, ... nothing to do
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from serving.models.grouped_matmul.tiles import GroupTile, group_tile
from vitstripe.platform import Platform

_MOST_ELEMENTS = 2**31
"""Offsets in the kernel are 32-bit."""


def serves(
    x: Array | jax.ShapeDtypeStruct, weights: Array | jax.ShapeDtypeStruct, rows: int, platform: Platform
) -> bool:
    """Whether the kernel takes these shapes and dtypes on this platform."""
    return (
        platform.runs_kernels
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and x.dtype == weights.dtype
        and min(rows, *x.shape, *weights.shape) > 0
        and max(x.size, weights.size, rows * weights.shape[1]) < _MOST_ELEMENTS
    )


def tiles_of(
    sizes: Int[Array, " E"], rows: int, count: int
) -> tuple[Int[Array, " T"], Int[Array, " T"], Int[Array, " T"]]:
    """(expert, first row, end of its rows) of each of `count` tiles of `rows` rows; the two rows are equal where there
    is nothing to do."""
    ends = jnp.cumsum(sizes)
    tiles = (sizes + rows - 1) // rows
    last = jnp.cumsum(tiles)
    tile = jnp.arange(count, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, tile, side="right"), sizes.shape[0] - 1).astype(jnp.int32)
    first = ends[expert] - sizes[expert] + (tile - (last[expert] - tiles[expert])) * rows
    there = tile < last[-1]
    return expert, jnp.where(there, first, 0).astype(jnp.int32), jnp.where(there, ends[expert], 0).astype(jnp.int32)


def _kernel(
    expert_ref: Any,
    first_ref: Any,
    end_ref: Any,
    rows_ref: Any,
    x_ref: Any,
    w_ref: Any,
    out_ref: Any,
    *,
    tile: GroupTile,
):
    number, strip = pl.program_id(0), pl.program_id(1)
    expert, first, end = expert_ref[number], first_ref[number], end_ref[number]
    (outputs, inputs), depth = w_ref.shape[1:], tile.depth

    def work(_, nothing):
        # Past the last row or column a tile holds that one again, and stores the same bits.
        row = jnp.minimum(first + jnp.arange(tile.rows, dtype=jnp.int32), end - 1)
        source = plt.load(rows_ref.at[row])
        column = jnp.minimum(strip * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32), outputs - 1)

        def load(at, height, inside):
            if inputs % depth == 0:
                return plt.load(at)
            return plt.load(at, mask=jnp.broadcast_to(inside[None, :], (height, depth)), other=0.0)

        def step(i, acc):
            k = i * depth + jnp.arange(depth, dtype=jnp.int32)
            a = load(x_ref.at[source[:, None], k[None, :]], tile.rows, k < inputs)
            b = load(w_ref.at[expert, column[:, None], k[None, :]], tile.columns, k < inputs)
            return acc + plt.dot(a, b.T)

        acc = lax.fori_loop(0, -(-inputs // depth), step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
        plt.store(out_ref.at[row[:, None], column[None, :]], acc.astype(out_ref.dtype))
        return nothing

    lax.fori_loop(0, (first < end).astype(jnp.int32), work, jnp.int32(0))


def grouped_matmul_triton(
    x: Float[Array, "T I"],
    weights: Float[Array, "E O I"],
    sizes: Int[Array, " E"],
    rows: Int[Array, " M"],
    *,
    platform: Platform,
    spread: int | None = None,
    tile: GroupTile | None = None,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """See `grouped_matmul`. platform: what it is compiled for; it chooses the tile unless `tile` is given. interpret:
    run as plain JAX operations, on any device."""
    count, (experts, outputs, _) = rows.shape[0], weights.shape
    tile = tile or group_tile(platform, count, spread or experts)
    # Of each expert at most one tile is short.
    tiles = count // tile.rows + min(experts, count)
    return pl.pallas_call(
        partial(_kernel, tile=tile),
        grid=(tiles, -(-outputs // tile.columns)),
        out_shape=jax.ShapeDtypeStruct((count, outputs), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_matmul",
    )(*tiles_of(sizes, tile.rows, tiles), rows, x, weights)
