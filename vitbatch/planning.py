"""Host planning: which image goes into which call, lane and rows. Pure numpy; a device program only sees the result.

calls    images in first-seen order, as many as the patch budget and the largest bucket allow
lanes    a call's images, longest first, each to the least loaded lane
layout   in a lane, images back to back, each starting at a multiple of 64 patches:

    lane 0   | image 3          |gap| image 0  |gap| padding ... |   capacity = smallest bucket that holds
    lane 1   | image 1    |gap| image 2 |gap| padding .......... |   the fullest lane
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from vitbatch.config import ATTENTION_BLOCK, BucketLadder, align
from vitbatch.lanes import LaneInputs, Segments


@dataclass(frozen=True)
class LaneAssignment:
    """order: image indices, lane 0's first. counts: images a lane. loads: patches a lane."""

    order: list[int]
    counts: list[int]
    loads: list[int]

    def lanes(self) -> list[list[int]]:
        """The images of each lane, longest first."""
        ends = np.cumsum(self.counts)
        return [self.order[end - count : end] for end, count in zip(ends, self.counts, strict=True)]


def assign_lanes(sizes: Sequence[int], lanes: int) -> LaneAssignment:
    """Greedy longest-first: images by size descending (equal sizes keep their order), each to the lane with the
    smallest load so far, ties to the lowest lane. The load is linear in patches, as in sglang's data-parallel
    encoder."""
    held: list[list[int]] = [[] for _ in range(lanes)]
    loads = [0] * lanes
    for image in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lane = loads.index(min(loads))
        held[lane].append(image)
        loads[lane] += sizes[image]
    return LaneAssignment([i for lane in held for i in lane], [len(lane) for lane in held], loads)


@dataclass(frozen=True)
class CallPlan:
    """One encoder call.

    images: indices into the planned list, in first-seen order. lane, start: of each, in the same order; start in
    patches. sizes: patches of each. lanes: how many there are. capacity: patches a lane.
    """

    images: tuple[int, ...]
    sizes: tuple[int, ...]
    lane: tuple[int, ...]
    start: tuple[int, ...]
    lanes: int
    capacity: int

    @property
    def patches(self) -> int:
        """Real patches."""
        return sum(self.sizes)

    @property
    def lanes_filled(self) -> int:
        return len(set(self.lane))

    @property
    def padded_ratio(self) -> float:
        """Share of the computed patches that are padding."""
        return 1 - self.patches / (self.lanes * self.capacity)

    def token_rows(self, position: int, patches_per_token: int) -> Int[np.ndarray, "T"]:
        """Where the tokens of `images[position]` stand among the call's lanes * capacity / patches_per_token rows."""
        begin = (self.lane[position] * self.capacity + self.start[position]) // patches_per_token
        return np.arange(begin, begin + self.sizes[position] // patches_per_token)


def _place(sizes: Sequence[int], lanes: int) -> tuple[list[int], list[int], int]:
    """Lane and start of each image, and the fullest lane's length."""
    lane_of, start_of, fullest = [0] * len(sizes), [0] * len(sizes), 0
    for lane, held in enumerate(assign_lanes(sizes, lanes).lanes()):
        used = 0
        for image in held:
            lane_of[image], start_of[image] = lane, used
            used += align(sizes[image])
        fullest = max(fullest, used)
    return lane_of, start_of, fullest


def plan_calls(
    sizes: Sequence[int], lanes: int, ladder: BucketLadder, max_call_patches: int | None = None
) -> list[CallPlan]:
    """Splits images into calls, in order.

    sizes: patches an image. A call ends before the image that would take it over `max_call_patches` (None: no limit)
    or its fullest lane over the largest bucket. An image above the budget runs alone. Raises ValueError for an image
    above the largest bucket.
    """
    for size in sizes:
        ladder.bucket_for(size)
    calls: list[CallPlan] = []
    pending: list[int] = []
    placed: tuple[list[int], list[int], int] = ([], [], 0)

    def close():
        lane, start, fullest = placed
        capacity = ladder.bucket_for(fullest)
        chosen = tuple(sizes[i] for i in pending)
        calls.append(CallPlan(tuple(pending), chosen, tuple(lane), tuple(start), lanes, capacity))

    for image, size in enumerate(sizes):
        grown = _place([sizes[i] for i in pending] + [size], lanes)
        over_budget = max_call_patches is not None and sum(sizes[i] for i in pending) + size > max_call_patches
        if pending and (over_budget or grown[2] > ladder.largest):
            close()
            pending, grown = [], _place([size], lanes)
        pending.append(image)
        placed = grown
    if pending:
        close()
    return calls


def merge_order(gh: int, gw: int, merge: int) -> Int[np.ndarray, "N 2"]:
    """Row and column of each patch of a gh x gw grid, merge block by merge block (blocks row-major, row-major
    inside). Raises ValueError when the grid is no whole number of merge blocks."""
    if gh < 1 or gw < 1 or gh % merge or gw % merge:
        raise ValueError(f"grid {gh}x{gw} is not made of whole {merge}x{merge} merge blocks")
    grid = np.stack(np.meshgrid(np.arange(gh), np.arange(gw), indexing="ij"), -1).astype(np.int32)
    return grid.reshape(gh // merge, merge, gw // merge, merge, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def lay_out(
    plan: CallPlan,
    grids: Sequence[tuple[int, int]],
    merge: int,
    num_taps: int,
    position_taps: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
) -> LaneInputs[np.ndarray]:
    """The arrays of a call, with a leading lane axis. grids: (gh, gw) of every planned image, indexed as in
    `plan.images`. Padding has position 0, tap weight 0 and belongs to no image.
    """
    L, C = plan.lanes, plan.capacity
    blocks = C // ATTENTION_BLOCK
    layout = LaneInputs[np.ndarray](
        np.zeros((L, C, 2), np.int32),
        np.zeros((L, C, num_taps), np.int32),
        np.zeros((L, C, num_taps), np.float32),
        Segments(np.tile(np.arange(blocks, dtype=np.int32), (L, 1)), np.zeros((L, blocks), np.int32)),
    )
    for image, size, lane, start in zip(plan.images, plan.sizes, plan.lane, plan.start, strict=True):
        gh, gw = grids[image]
        if gh * gw != size:
            raise ValueError(f"image {image} was planned with {size} patches but its grid is {gh}x{gw}")
        rows = slice(start, start + size)
        layout.positions[lane, rows] = merge_order(gh, gw, merge)
        if num_taps:
            layout.tap_index[lane, rows], layout.tap_weight[lane, rows] = position_taps(gh, gw)
        own = slice(start // ATTENTION_BLOCK, (start + align(size)) // ATTENTION_BLOCK)
        layout.segments.first[lane, own] = own.start
        layout.segments.end[lane, own] = start + size
    return layout
