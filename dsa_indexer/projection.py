"""From tokens to query rows in tiles of one size, so that a row has the same bits in whatever batch it is projected."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from dsa_indexer.chunks import map_chunks
from vitstripe.platform import Platform, default_platform

PROJECTION_ROWS, MOST_PROJECTION_ROWS = 64, 4096
"""Rows projected at once, on a CPU and at most on a GPU. With stripes of a multiple of it, a device projects the very
tiles that the replicated program projects. With other stripes a row lies elsewhere in a tile and among other rows, and
equal bits then rest on a matrix product of one shape computing its rows alike: so it is on the platforms tested, a CPU
and an NVIDIA H200."""

Project = Callable[..., tuple[Array, Array]]
"""Arrays of m tokens -> q [m, H, D] and gates [m, H]; each row from its own token alone."""


def projection_rows(num_rows: int, platform: Platform) -> int:
    """Rows projected at once of a batch of num_rows: 64 on a CPU, on a GPU an eighth of the batch, within 64 and 4096,
    because tiles of 64 leave a GPU idle."""
    if not platform.runs_kernels:
        return PROJECTION_ROWS
    return min(max((1 << (num_rows // 8).bit_length()) >> 1, PROJECTION_ROWS), MOST_PROJECTION_ROWS)


@jax.named_scope("project")
def project_rows(
    project: Project, inputs: Any, *, batch: int | None = None, platform: Platform | None = None
) -> tuple[Array, Array]:
    """q [M, H, D] and gates [M, H] of M tokens: project(*inputs), projection_rows(batch, platform) tokens at a time.

    inputs: a tuple of arrays [M, ...], such as x, q_lora, cos and sin for `Indexer.queries`. The last tile is filled
    up with zeros. batch: rows of the whole batch where these are only a device's own, None for M. platform: what it is
    compiled for, None for the first device.
    """
    num_rows = jax.tree.leaves(inputs)[0].shape[0]
    rows = projection_rows(batch or num_rows, platform or default_platform())

    def tile(*parts: Array) -> tuple[Array, Array]:
        # The barriers keep the tile's computation apart from its surroundings, which differ from program to program.
        return lax.optimization_barrier(project(*lax.optimization_barrier(parts)))

    return map_chunks(tile, rows, *inputs)
