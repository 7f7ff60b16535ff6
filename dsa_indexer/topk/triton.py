"""Exact selection in four kernels: Pallas through Triton, the backend that reaches AMD as well as NVIDIA.

    1. guess    a sample of the row guesses a threshold t a little below its k-th score: about rank 1.4 k
    2. filter   one pass over the row writes, in order, every column above t and the first k equal to it: candidates
    3. repair   only where the candidates are fewer than k or more than their list of 2 k holds: other thresholds, from
                the sample with what the pass found, then bisected between bounds that each pass tightens
    4. pick     the k-th candidate is found bit by bit, in registers, and the k best are written in order

A row's selection depends on that row alone. Any row passes in the end: at the exact k-th score there are at most k - 1
columns above and k columns equal to it in the list. So equal scores, however many, never overflow it.

    scores   9 4 7 4 4 1 8 4      k = 3, t = 4: candidates 9 4 7 4 4 8, the last 4 is one too many
    picked   9   7       8        k-th candidate 7, columns 0 2 6
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Int32

from dsa_indexer.tiles import SelectTile, select_tile
from dsa_indexer.topk.order import NOTHING_FORCED, ForcedTokens
from dsa_indexer.topk.triton_kernels import filter_kernel, goal, guess_kernel, pick_kernel, repair_kernel
from vitstripe.platform import Platform

LARGEST_K = 8192
_SMALLEST_LIST, _SMALLEST_SAMPLE = 256, 1024
_LEAST_RANK = 256
"""The rank that a guess shall have in a sample of the longest row. It deviates by a sixteenth, and is wrong from three
tenths on: once in 10^8 rows. With half of it a few of 32768 rows are repaired, which takes longer than was saved."""


def select_topk_triton(
    scores: Float32[Array, "M N"],
    ks: Int32[Array, "M"],
    lengths: Int32[Array, "M"],
    *,
    k: int,
    forced: ForcedTokens = NOTHING_FORCED,
    platform: Platform,
    tile: SelectTile | None = None,
    interpret: bool = False,
) -> Int32[Array, "M k"]:
    """The k largest of scores[m, ks[m] : ks[m] + lengths[m]], as positions relative to ks, ascending, then -1.

    The bits of `select_topk` on the same scores, whatever they are: equal, infinite, NaN. Columns outside a row's
    window are never read as scores. A length of 0 or below gives -1 alone. forced: keys that come before all others.
    platform: what it is compiled for; it chooses the tile unless `tile` is given. interpret: run as plain JAX
    operations, on any device.

    Raises ValueError for k below 1 or above LARGEST_K.
    """
    if not 1 <= k <= LARGEST_K:
        raise ValueError(f"k is {k}; the selection kernel takes 1 to {LARGEST_K}, use the implementation 'threshold'")
    num_rows, num_keys = scores.shape
    if num_rows == 0 or num_keys == 0:
        return jnp.full_like(ks, -1, shape=(num_rows, k))
    tile = select_tile(platform) if tile is None else tile
    # Twice k, and more where k is small: a sample of few scores above the threshold says little.
    capacity = max(2 << (k - 1).bit_length(), _SMALLEST_LIST)
    # Of shorter rows a smaller sample guesses as well.
    enough = max(int(_LEAST_RANK * num_keys / goal(k, capacity)), _SMALLEST_SAMPLE)
    tile = replace(tile, sample=min(tile.sample, 1 << (enough - 1).bit_length()))

    def call(
        kernel: Any, grid: int, outputs: tuple[jax.ShapeDtypeStruct, ...], warps: int, *operands: Array, **options
    ):
        return pl.pallas_call(
            partial(kernel, k=k, capacity=capacity, forced=forced, tile=tile),
            grid=(grid,),
            out_shape=outputs,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name=f"select_{kernel.__name__.removesuffix('_kernel')}",
            **options,
        )(*operands)

    numbers = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    values = jax.ShapeDtypeStruct((num_rows, capacity), jnp.float32)
    columns = jax.ShapeDtypeStruct((num_rows, capacity), jnp.int32)
    threshold, careful = call(guess_kernel, num_rows, (numbers, numbers), tile.guess_warps, scores, ks, lengths)
    found = call(
        filter_kernel,
        num_rows,
        (values, columns, numbers, numbers),
        tile.warps,
        scores,
        ks,
        lengths,
        threshold,
        careful,
    )
    found = call(
        repair_kernel,
        -(-num_rows // tile.repair_rows),
        (values, columns, numbers, numbers),
        tile.repair_warps,
        scores,
        ks,
        lengths,
        threshold,
        *found,
        input_output_aliases={4: 0, 5: 1, 6: 2, 7: 3},
    )
    [picked] = call(
        pick_kernel, num_rows, (jax.ShapeDtypeStruct((num_rows, k), jnp.int32),), tile.pick_warps, lengths, *found
    )
    return picked
