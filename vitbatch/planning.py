"""Host planning: which image goes into which call, lane and rows. Pure numpy; a device program only sees the result.

calls    images in first-seen order, cut where the least padding is computed, within the patch budget
lanes    a call's images, longest first, each to the least loaded lane
layout   in a lane, images back to back, each starting at a multiple of 64 patches (of 4 in a tiny lane):

    lane 0   | image 3          |gap| image 0  |gap| padding ... |   capacity = smallest bucket that holds
    lane 1   | image 1    |gap| image 2 |gap| padding .......... |   the fullest lane
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Int

from vitbatch.config import ATTENTION_BLOCK, TINY_BLOCK, Bucket, BucketLadder, VisionConfig, align, room
from vitbatch.lanes import LaneInputs, Segments
from vitbatch.windows import add_windows, no_windows

# A call costs as much as this many patches a lane: what launching it takes beyond its rows. Splits that save less are
# not made.
_CALL_COST = 256

# A split whose cost is within this factor of the least imaginable one is taken without looking at others.
_GOOD_ENOUGH = 1.04

# Images whose split into calls is weighed at once; more are planned window by window.
_WINDOW = 128


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


def assign_lanes(sizes: Sequence[int], lanes: int, quadratic: float = 0.0) -> LaneAssignment:
    """Greedy longest-first: images by size descending (equal sizes keep their order), each to the lane with the
    smallest cost so far, ties to the lowest lane.

    quadratic: an image of N patches costs N * (1 + quadratic * N). 0 is the rule of sglang's data-parallel encoder,
    linear in patches; `attention_cost` gives the value at which attention counts for what it takes.
    """
    held: list[list[int]] = [[] for _ in range(lanes)]
    loads = [0] * lanes
    cheapest = [(0.0, lane) for lane in range(lanes)]
    for image in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        cost, lane = cheapest[0]
        held[lane].append(image)
        loads[lane] += sizes[image]
        heapq.heapreplace(cheapest, (cost + sizes[image] * (1 + quadratic * sizes[image]), lane))
    return LaneAssignment([i for lane in held for i in lane], [len(lane) for lane in held], loads)


def attention_cost(vision: VisionConfig) -> float:
    """`quadratic` for a tower: attention's 4NH multiply-adds a patch of an N-patch image against the 8H^2 + 4HF of a
    block's matmuls (H hidden_size, F intermediate_size; a gated MLP has 6HF, which makes it an upper bound)."""
    return 1 / (2 * vision.hidden_size + vision.intermediate_size)


@dataclass(frozen=True)
class CallPlan:
    """One encoder call.

    images: indices into the planned list, in first-seen order. lane, start: of each, in the same order; start in
    patches. sizes: patches of each. lanes: how many there are. bucket: the shape of each lane.
    """

    images: tuple[int, ...]
    sizes: tuple[int, ...]
    lane: tuple[int, ...]
    start: tuple[int, ...]
    lanes: int
    bucket: Bucket

    @property
    def capacity(self) -> int:
        """Patches a lane."""
        return self.bucket.capacity

    @property
    def patches(self) -> int:
        """Real patches."""
        return sum(self.sizes)

    @property
    def lanes_filled(self) -> int:
        return len(set(self.lane))

    @property
    def imbalance(self) -> float:
        """Patches of the fullest lane over the mean; 1 when all lanes hold the same."""
        loads = np.bincount(self.lane, self.sizes, self.lanes)
        return float(loads.max() / loads.mean())

    @property
    def padded_ratio(self) -> float:
        """Share of the computed patches that are padding."""
        return 1 - self.patches / (self.lanes * self.capacity)

    def token_rows(self, position: int, patches_per_token: int) -> Int[np.ndarray, "T"]:
        """Where the tokens of `images[position]` stand among the call's lanes * capacity / patches_per_token rows."""
        begin = (self.lane[position] * self.capacity + self.start[position]) // patches_per_token
        return np.arange(begin, begin + self.sizes[position] // patches_per_token)


@dataclass(frozen=True)
class _Placed:
    """Lane and start of each image, and the fullest lane's length."""

    lane: tuple[int, ...]
    start: tuple[int, ...]
    fullest: int


def _place(sizes: Sequence[int], lanes: int, quadratic: float, block: int = ATTENTION_BLOCK) -> _Placed:
    lane_of, start_of, fullest = [0] * len(sizes), [0] * len(sizes), 0
    for lane, held in enumerate(assign_lanes(sizes, lanes, quadratic).lanes()):
        used = 0
        for image in held:
            lane_of[image], start_of[image] = lane, used
            used += room(sizes[image], block)
        fullest = max(fullest, used)
    return _Placed(tuple(lane_of), tuple(start_of), fullest)


def plan_calls(
    sizes: Sequence[int],
    lanes: int,
    ladder: BucketLadder,
    max_call_patches: int | None = None,
    quadratic: float = 0.0,
    lane_patches: int | None = None,
) -> list[CallPlan]:
    """Splits images into calls, in order, so that the fewest patches are computed, padding included.

    sizes: patches an image. A call holds at most `max_call_patches` real patches (None: no limit; an image above it
    runs alone), and its fullest lane no more than the largest bucket, nor more than the bucket of `lane_patches` unless
    one of its images needs that. An additional call must save 256 patches a lane; among equally good splits the
    earliest call is the largest. quadratic: see `assign_lanes`. Raises ValueError for an image above the largest
    bucket.
    """
    lane_patches = ladder.largest if lane_patches is None else min(lane_patches, ladder.largest)
    for size in sizes:
        ladder.bucket_for(size)
    calls: list[CallPlan] = []
    begin = 0
    while begin < len(sizes):
        window = sizes[begin : begin + _WINDOW]
        split = _cheapest_split(window, lanes, ladder, max_call_patches, quadratic, lane_patches)
        if begin + len(window) < len(sizes):
            # The last call may have room for images past the window: it is planned again with them.
            split = split[:-1] or split
        for first, stop, bucket in split:
            calls.append(plan_call(sizes[begin + first : begin + stop], lanes, bucket, quadratic, begin + first))
        begin += split[-1][1]
    return calls


def plan_call(sizes: Sequence[int], lanes: int, bucket: Bucket, quadratic: float = 0.0, number: int = 0) -> CallPlan:
    """One call of all these images, the first of which is image `number` of its list. Raises ValueError when the
    fullest lane does not fit the bucket."""
    placed = _place(sizes, lanes, quadratic, bucket.block)
    if placed.fullest > bucket.capacity or max(sizes, default=0) > bucket.longest:
        raise ValueError(f"lanes of {placed.fullest} patches do not fit the bucket {bucket}")
    images = tuple(range(number, number + len(sizes)))
    return CallPlan(images, tuple(sizes), placed.lane, placed.start, lanes, bucket)


def _cheapest_split(
    sizes: Sequence[int],
    lanes: int,
    ladder: BucketLadder,
    max_call_patches: int | None,
    quadratic: float,
    lane_patches: int,
) -> list[tuple[int, int, Bucket]]:
    """(first, stop, bucket) of each call.

    From each place a call may begin, only the longest call of each capacity is a candidate: a shorter one would leave
    more for the rest at the same price. Large capacities are tried first, and smaller ones only while what they could
    save is worth the search; tiny lanes where the next images are tiny.
    """
    total = [0, *np.cumsum(sizes).tolist()]
    taken = [0, *np.cumsum([room(size) for size in sizes]).tolist()]
    tiny_taken = [0, *np.cumsum([room(size, TINY_BLOCK) for size in sizes]).tolist()]

    @cache
    def best(first: int) -> tuple[int, tuple[tuple[int, int, Bucket], ...]]:
        """The cost of everything from `first` on, and its calls."""
        if first == len(sizes):
            return 0, ()
        found: tuple[int, tuple[tuple[int, int, Bucket], ...]] | None = None
        limit, placed = len(sizes), 0
        if max_call_patches is not None:
            limit = max(first + 1, bisect_right(total, total[first] + max_call_patches) - 1)
        capacity = ladder.bucket_for(max(lane_patches, *sizes[first:limit]))
        while True:
            stop = min(limit, bisect_right(taken, taken[first] + lanes * capacity) - 1)
            while stop > first:
                longest = min(capacity, ladder.bucket_for(max(lane_patches, *sizes[first:stop])))
                placed = _place(sizes[first:stop], lanes, quadratic).fullest
                if placed <= longest:
                    break
                stop -= 1
            if stop == first:
                break
            bucket = ladder.bucket_for(placed)
            rest, calls = best(stop)
            cost = bucket + _CALL_COST + rest
            if found is None or cost < found[0]:
                found = cost, ((first, stop, Bucket(bucket)), *calls)
            smaller = [c for c in ladder.capacities if c < bucket]
            # No padding but the gaps between images, lanes in perfect balance, and at least one call more.
            least = (taken[-1] - taken[first]) / lanes + 2 * _CALL_COST
            if not smaller or found[0] <= _GOOD_ENOUGH * least:
                break
            capacity = smaller[-1]
        assert found is not None, "an image fits the largest bucket, which is tried first"
        for capacity in ladder.tiny:
            tiny = Bucket(capacity, TINY_BLOCK)
            stop, most = first, tiny_taken[first] + lanes * capacity
            while stop < limit and sizes[stop] <= tiny.longest and tiny_taken[stop + 1] <= most:
                stop += 1
            while stop > first and _place(sizes[first:stop], lanes, quadratic, TINY_BLOCK).fullest > capacity:
                stop -= 1
            if stop == first:
                break
            rest, calls = best(stop)
            if (cost := capacity + _CALL_COST + rest) < found[0]:
                found = cost, ((first, stop, tiny), *calls)
        return found

    return list(best(0)[1])


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
    window_cells: int = 0,
) -> LaneInputs[np.ndarray]:
    """The arrays of a call, with a leading lane axis. grids: (gh, gw) of every planned image, indexed as in
    `plan.images`. window_cells: see `VisionConfig`. Padding has position 0, tap weight 0 and belongs to no image.
    """
    L, C = plan.lanes, plan.capacity
    block, blocks = plan.bucket.block, plan.bucket.blocks
    layout = LaneInputs[np.ndarray](
        np.zeros((L, C, 2), np.int32),
        np.zeros((L, C, num_taps), np.int32),
        np.zeros((L, C, num_taps), np.float32),
        Segments(np.tile(np.arange(blocks, dtype=np.int32), (L, 1)), np.zeros((L, blocks), np.int32)),
        no_windows(L, C // merge**2) if window_cells else None,
    )
    for image, size, lane, start in zip(plan.images, plan.sizes, plan.lane, plan.start, strict=True):
        gh, gw = grids[image]
        if gh * gw != size:
            raise ValueError(f"image {image} was planned with {size} patches but its grid is {gh}x{gw}")
        rows = slice(start, start + size)
        layout.positions[lane, rows] = merge_order(gh, gw, merge)
        if num_taps:
            layout.tap_index[lane, rows], layout.tap_weight[lane, rows] = position_taps(gh, gw)
        own = slice(start // block, (start + align(size, block)) // block)
        layout.segments.first[lane, own] = own.start
        layout.segments.end[lane, own] = start + size
        if layout.windows is not None:
            add_windows(layout.windows, lane, start // merge**2, gh // merge, gw // merge, window_cells)
    return layout
