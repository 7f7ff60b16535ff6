"""Paged attention as kernels: Pallas through Triton, the backend that reaches AMD as well as NVIDIA.

Both kernels keep the query heads of one key head side by side in a tile, so that a key page is read once for all of
them, and let key blocks stream by with a running softmax in base 2. Blocks start at the request's first key and have a
fixed size, and what a row does not see changes none of its bits; so its result depends on its own request alone.

Decode: one row a request. Its keys are cut in parts of a fixed number, which programs sum side by side; a second kernel
puts the parts together, always in the same order.

    request A   part 0 | part 1 | part 2        programs (row, worker, key head): worker w takes parts w, w + workers
    request B   part 0 |

Extend: a program owns a window of rows that lie side by side. As a rule they belong to one request, and the window is
one tile; where several requests meet in it, their keys go by one request after another, and the rows of the others are
left as they were.

    row tile      0   1 | 2   3 | 4   5
    request       A   A | A   B | B   -         window 1 lets the keys of A go by, then those of B
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from serving.models.paged_attention.tiles import DecodeTile, ExtendTile, decode_tile, extend_tile
from vitstripe.exp2 import Exp2, exp2_for
from vitstripe.platform import Platform

_NO_SCORE = -1e30
"""The peak of a row that has seen no key yet; finite, so that such a row gives 0 and not NaN."""
_HIDDEN = -1e38
"""The score of a key that a row does not see. Scaled, it is still so far below _NO_SCORE that its weight is exactly
0."""
_SMALLEST_SIDE = 16  # of a matrix instruction
_HEAD_DIMS = (64, 128, 256)
_PROGRAMS = 4096  # what a decode pass is spread over: enough to fill a GPU with some to spare
_MOST_PARTS = 64


def serves(q: Array, k_pages: Array, tile_request: Array, num_groups: int, platform: Platform) -> bool:
    """Whether the kernels take these shapes and dtypes on this platform."""
    rows = q.shape[0] // max(tile_request.shape[0], 1)
    return (
        platform.runs_kernels
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.dtype == k_pages.dtype
        and q.shape[-1] in _HEAD_DIMS
        and min(q.shape[0], k_pages.shape[0], num_groups) > 0
        and rows & (rows - 1) == 0
        and _lanes(q.shape[1] // num_groups) <= extend_tile(platform, q.shape[-1]).queries
    )


def _lanes(heads: int) -> int:
    """Rows of a tile that the query heads of a key head take: the next power of two."""
    return 1 << (heads - 1).bit_length()


class _Keys:
    """The key and value rows of one key head of one request, read in blocks through its page table."""

    def __init__(self, k_ref: Any, v_ref: Any, table_ref: Any, request: Any, kv_head: Any, *, block: int, page: int):
        self.refs, self.table, self.request, self.head = (k_ref, v_ref), table_ref, request, kv_head
        self.block, self.page, self.dim = block, page, k_ref.shape[-1]

    def slots(self, start: Any, end: Any) -> Any:
        """Where the keys [start, start + block) lie, a slice where they lie in one page. Past `end`, the last key
        again."""
        if self.page % self.block == 0:
            page = self.table[self.request, start // self.page]
            return pl.ds(page * self.page + lax.rem(start, jnp.int32(self.page)), self.block)
        column = jnp.minimum(start + jnp.arange(self.block, dtype=jnp.int32), end - 1)
        page = plt.load(self.table.at[self.request, column // self.page])
        return page * self.page + column % self.page

    def load(self, which: int, slots: Any, wanted: Any) -> Any:
        """[block, D] of keys (0) or values (1). Rows that are not wanted become 0: whatever lies there, a NaN say, must
        not meet the weights."""
        if isinstance(slots, Array):
            at = self.refs[which].at[slots[:, None], self.head, jnp.arange(self.dim, dtype=jnp.int32)[None, :]]
        else:
            at = self.refs[which].at[slots, self.head, :]
        if wanted is None:
            return plt.load(at)
        return plt.load(at, mask=jnp.broadcast_to(wanted[:, None], (self.block, self.dim)), other=0.0)


def _start(rows: int, dim: int) -> tuple[Array, Array, Array]:
    """(peak, total, sum of values) of rows that have seen nothing."""
    return jnp.full((rows,), _NO_SCORE), jnp.zeros((rows,)), jnp.zeros((rows, dim))


def _visit(
    q: Any, keys: _Keys, start: Any, end: Any, limits: Any, others: Any, scale: float, exp2: Exp2, carry: Any
) -> Any:
    """The carry after the block of keys at `start`. end: none of the tile's rows sees a key there or after. limits: the
    keys each row sees, None where every row sees the whole block. others: rows whose values stay, None for none."""
    peak, total, acc = carry
    slots = keys.slots(start, end)
    scores = plt.dot(q, keys.load(0, slots, None).T)
    inside = None
    if limits is not None:
        column = start + jnp.arange(keys.block, dtype=jnp.int32)
        inside = column < end
        scores = jnp.where(column[None, :] < limits[:, None], scores, _HIDDEN)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * scale)
    weights = exp2(scores, scale, new_peak[:, None])
    shrink = jnp.exp2(peak - new_peak)
    total = total * shrink + jnp.sum(weights, axis=1)
    values = keys.load(1, slots, inside)
    new_acc = acc * shrink[:, None] + plt.dot(weights.astype(values.dtype), values)
    return new_peak, total, new_acc if others is None else jnp.where(others[:, None], acc, new_acc)


def _decode_kernel(
    kv_heads_ref: Any,
    lengths_ref: Any,
    request_ref: Any,
    table_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    acc_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    *,
    tile: DecodeTile,
    part: int,
    group: int,
    page: int,
    scale: float,
    exp2: Exp2,
):
    row, worker, key_group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    workers, dim = pl.num_programs(1), k_ref.shape[-1]
    length = lengths_ref[row]
    lanes = max(_lanes(group), _SMALLEST_SIDE)
    lane, column = jnp.arange(lanes, dtype=jnp.int32), jnp.arange(dim, dtype=jnp.int32)
    # Lanes without a head of their own do what the last head's does, and store the same bits.
    head = key_group * group + jnp.minimum(lane, group - 1)
    q = plt.load(q_ref.at[row, head[:, None], column[None, :]])
    keys = _Keys(k_ref, v_ref, table_ref, request_ref[row], kv_heads_ref[key_group], block=tile.keys, page=page)

    def work(i, nothing):
        number = worker + i * workers
        start = number * part
        end = jnp.minimum(start + part, length)
        whole = (end - start) // tile.keys
        blocks = (end - start + tile.keys - 1) // tile.keys
        limits = jnp.broadcast_to(end, (lanes,))

        def step(j, carry, masked):
            return _visit(q, keys, start + j * tile.keys, end, limits if masked else None, None, scale, exp2, carry)

        carry = lax.fori_loop(0, whole, partial(step, masked=False), _start(lanes, dim))
        peak, total, acc = lax.fori_loop(whole, blocks, partial(step, masked=True), carry)
        plt.store(acc_ref.at[row, head[:, None], number, column[None, :]], acc)
        plt.store(peak_ref.at[row, head, number], peak)
        plt.store(total_ref.at[row, head, number], total)
        return nothing

    parts = (length + part - 1) // part
    lax.fori_loop(0, jnp.maximum(parts - worker + workers - 1, 0) // workers, work, jnp.int32(0))


def _combine_kernel(
    lengths_ref: Any, acc_ref: Any, peak_ref: Any, total_ref: Any, out_ref: Any, *, part: int, most: int
):
    row, head = pl.program_id(0), pl.program_id(1)
    number = jnp.arange(most, dtype=jnp.int32)
    column = jnp.arange(out_ref.shape[-1], dtype=jnp.int32)
    # What stands at parts that the request does not have was never written.
    there = number * part < lengths_ref[row]
    at = jnp.minimum(number, acc_ref.shape[2] - 1)
    peaks = plt.load(peak_ref.at[row, head, at], mask=there, other=_NO_SCORE)
    totals = plt.load(total_ref.at[row, head, at], mask=there, other=0.0)
    values = plt.load(
        acc_ref.at[row, head, at[:, None], column[None, :]],
        mask=jnp.broadcast_to(there[:, None], (most, column.shape[0])),
        other=0.0,
    )
    weights = jnp.exp2(peaks - jnp.max(peaks, axis=0))
    total = jnp.sum(weights * totals, axis=0)
    out = jnp.sum(weights[:, None] * values, axis=0)
    out_ref[row, head, :] = (out / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)


def _extend_kernel(
    kv_heads_ref: Any,
    lengths_ref: Any,
    request_ref: Any,
    table_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    *,
    tile: ExtendTile,
    tile_rows: int,
    group: int,
    page: int,
    scale: float,
    exp2: Exp2,
):
    num_rows, dim = q_ref.shape[0], q_ref.shape[2]
    lanes = _lanes(group)
    rows = tile.queries // lanes
    # Last windows first: within a request they see the most keys, and the short ones fill the gaps at the end.
    window, key_group = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)
    index = jnp.arange(tile.queries, dtype=jnp.int32)
    column = jnp.arange(dim, dtype=jnp.int32)
    # Where there is no such row or head, the tile holds the last one again, and stores the same bits.
    row = jnp.minimum(window * rows + index // lanes, num_rows - 1)
    head = key_group * group + jnp.minimum(index % lanes, group - 1)
    limits = plt.load(lengths_ref.at[row])
    owner = plt.load(request_ref.at[row // tile_rows])
    q = plt.load(q_ref.at[row[:, None], head[:, None], column[None, :]])
    first, tiles = window * rows // tile_rows, max(rows // tile_rows, 1)
    last = num_rows // tile_rows - 1

    def run(j, carry):
        """Lets the keys of the request of the window's tile j go by, unless a tile before it has done so."""
        request = request_ref[jnp.minimum(first + j, last)]
        done = jnp.bool_(False)
        for i in range(tiles - 1):
            done |= (i < j) & (request_ref[jnp.minimum(first + i, last)] == request)
        mine = owner == request
        limit = jnp.where(mine, limits, 0)
        end = jnp.where(done, 0, jnp.max(limit))
        # Rows without keys do not matter: they become 0 at the end.
        least = jnp.min(jnp.where(limits > 0, limit, end))
        whole, blocks = jnp.minimum(least, end) // tile.keys, (end + tile.keys - 1) // tile.keys
        keys = _Keys(k_ref, v_ref, table_ref, request, kv_heads_ref[key_group], block=tile.keys, page=page)

        def step(j, carry, masked):
            others = ~mine if masked and tiles > 1 else None
            return _visit(q, keys, j * tile.keys, end, limit if masked else None, others, scale, exp2, carry)

        carry = lax.fori_loop(0, whole, partial(step, masked=False), carry)
        return lax.fori_loop(whole, blocks, partial(step, masked=True), carry)

    carry = _start(tile.queries, dim)
    _, total, acc = run(0, carry) if tiles == 1 else lax.fori_loop(0, tiles, run, carry)
    seen = limits > 0
    factor = jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)
    value = jnp.where(seen[:, None], acc * factor[:, None], 0.0).astype(out_ref.dtype)
    plt.store(out_ref.at[row[:, None], head[:, None], column[None, :]], value)


def _base_two(scale: float) -> float:
    return scale * math.log2(math.e)


def _operands(q, k_pages, v_pages, lengths, tile_request, page_table, kv_heads) -> tuple[Array, ...]:
    slots = (-1, *k_pages.shape[2:])
    return kv_heads, lengths, tile_request, page_table, q, k_pages.reshape(slots), v_pages.reshape(slots)


def _decode(arrays, group, page, scale, platform, tile, interpret) -> Array:
    q, width = arrays[4], arrays[3].shape[1] * page
    rows, heads, dim = q.shape
    # Longer parts where requests may be so long that the parts' sums would take more memory than they save time. This
    # depends on the longest request that is possible, not on those that are there.
    part = tile.part
    while part * _MOST_PARTS < width:
        part *= 2
    parts = -(-width // part)
    groups = arrays[0].shape[0]
    workers = min(parts, -(-_PROGRAMS // (rows * groups)))
    sums = jax.ShapeDtypeStruct((rows, heads, parts), jnp.float32)
    acc, peak, total = pl.pallas_call(
        partial(
            _decode_kernel,
            tile=tile,
            part=part,
            group=group,
            page=page,
            scale=_base_two(scale),
            exp2=exp2_for(platform, interpret=interpret),
        ),
        grid=(rows, workers, groups),
        out_shape=(jax.ShapeDtypeStruct((*sums.shape, dim), jnp.float32), sums, sums),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_decode",
    )(*arrays)
    return pl.pallas_call(
        partial(_combine_kernel, part=part, most=_lanes(parts)),
        grid=(rows, heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_combine",
    )(arrays[1], acc, peak, total)


def _extend(arrays, group, page, scale, platform, tile, interpret) -> Array:
    q, tile_request = arrays[4], arrays[2]
    rows = tile.queries // _lanes(group)
    kernel = partial(
        _extend_kernel,
        tile=tile,
        tile_rows=q.shape[0] // tile_request.shape[0],
        group=group,
        page=page,
        scale=_base_two(scale),
        exp2=exp2_for(platform, interpret=interpret),
    )
    return pl.pallas_call(
        kernel,
        grid=(-(-q.shape[0] // rows), arrays[0].shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_extend",
    )(*arrays)


def paged_attention_triton(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P S K D"],
    v_pages: Float[Array, "P S K D"],
    lengths: Int[Array, " T"],
    tile_request: Int[Array, " G"],
    page_table: Int[Array, "R W"],
    kv_heads: Int[Array, " J"],
    *,
    scale: float,
    platform: Platform,
    tile: DecodeTile | ExtendTile | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """See `paged_attention`; the result is in q's dtype. One row a tile is a decode, anything else an extend.

    kv_heads: the key head of each run of H / J query heads. Matrix products in the arrays' dtype with float32
    accumulation, softmax in float32, its weights rounded to v's dtype before they multiply v. platform: what it is
    compiled for; it chooses the tile unless `tile` is given. interpret: run as plain JAX operations, on any device.

    Raises ValueError for a tile of the other kind, for rows that cannot be cut in windows, and for more query heads a
    key head than the tile has rows.
    """
    arrays = _operands(q, k_pages, v_pages, lengths, tile_request, page_table, kv_heads)
    group, page, tile_rows = q.shape[1] // kv_heads.shape[0], k_pages.shape[1], q.shape[0] // tile_request.shape[0]
    if tile_rows == 1:
        tile = tile or decode_tile(platform, q.shape[-1])
        if not isinstance(tile, DecodeTile):
            raise ValueError(f"a decode (one row a tile) takes a DecodeTile, not {tile}")
        return _decode(arrays, group, page, scale, platform, tile, interpret)
    tile = tile or extend_tile(platform, q.shape[-1])
    if not isinstance(tile, ExtendTile):
        raise ValueError(f"an extend ({tile_rows} rows a tile) takes an ExtendTile, not {tile}")
    if _lanes(group) > tile.queries:
        raise ValueError(f"{group} query heads a key head are over the {tile.queries} rows of a tile")
    if tile_rows & (tile_rows - 1):
        raise ValueError(f"{tile_rows} rows a tile of one request; the kernel takes powers of two")
    return _extend(arrays, group, page, scale, platform, tile, interpret)
