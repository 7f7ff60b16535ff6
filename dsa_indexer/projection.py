"""From tokens to query rows in tiles of one size, so that a row has the same bits in whatever batch it is projected."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array

from dsa_indexer.chunks import map_chunks

PROJECTION_ROWS = 64
"""Rows projected at once. With stripes of a multiple of it, a device projects the very tiles that the replicated
program projects. With other stripes a row lies elsewhere in a tile and among other rows, and equal bits then rest on a
matrix product of one shape computing its rows alike: so it is on the platforms tested, a CPU and no other so far."""

Project = Callable[..., tuple[Array, Array]]
"""Arrays of m tokens -> q [m, H, D] and gates [m, H]; each row from its own token alone."""


def project_rows(project: Project, inputs: Any) -> tuple[Array, Array]:
    """q [M, H, D] and gates [M, H] of M tokens: project(*inputs), PROJECTION_ROWS tokens at a time.

    inputs: a tuple of arrays [M, ...], such as x, q_lora, cos and sin for `Indexer.queries`. The last tile is filled
    up with zeros.
    """

    def tile(*parts: Array) -> tuple[Array, Array]:
        # The barriers keep the tile's computation apart from its surroundings, which differ from program to program.
        return lax.optimization_barrier(project(*lax.optimization_barrier(parts)))

    return map_chunks(tile, PROJECTION_ROWS, *inputs)
