"""Host planning: lanes, calls, capacities and layout."""

import numpy as np
import pytest

from vitbatch import BucketLadder
from vitbatch.config import align
from vitbatch.planning import assign_lanes, lay_out, merge_order, plan_calls


def test_the_worked_example_of_longest_first():
    dealt = assign_lanes([1000, 100, 200, 50], 2)
    assert (dealt.order, dealt.counts, dealt.loads) == ([0, 2, 1, 3], [1, 3], [1000, 350])
    assert dealt.lanes() == [[0], [2, 1, 3]]


def test_equal_images_go_round_robin_and_keep_their_order():
    assert assign_lanes([7] * 5, 3).lanes() == [[0, 3], [1, 4], [2]]


def test_fewer_images_than_lanes_leave_lanes_empty():
    dealt = assign_lanes([4, 16], 4)
    assert (dealt.counts, dealt.loads) == ([1, 1, 0, 0], [16, 4, 0, 0])


def test_no_images_make_no_call():
    assert assign_lanes([], 3).loads == [0, 0, 0]
    assert plan_calls([], 3, BucketLadder((64,))) == []


def test_the_capacity_is_the_smallest_bucket_that_holds_the_fullest_lane():
    ladder = BucketLadder((256, 384, 1024))
    # 300 takes 320 patches; 100 and 60 take 128 and 64.
    (call,) = plan_calls([100, 300, 60], 2, ladder)
    assert (call.lane, call.start, call.capacity) == ((1, 0, 1), (0, 0, 128), 384)
    assert (call.patches, call.lanes_filled) == (460, 2)
    assert call.padded_ratio == pytest.approx(1 - 460 / 768)


def test_a_call_ends_before_its_fullest_lane_outgrows_the_ladder():
    calls = plan_calls([200, 200, 200, 64], 2, BucketLadder((256,)))
    assert [c.images for c in calls] == [(0, 1), (2, 3)]


def test_a_call_ends_before_the_patch_budget_and_a_larger_image_runs_alone():
    calls = plan_calls([100, 100, 500, 100, 90, 20], 2, BucketLadder((512,)), max_call_patches=200)
    assert [c.images for c in calls] == [(0, 1), (2,), (3, 4), (5,)]


def test_an_image_above_the_largest_bucket_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="600 patches exceed the largest bucket of 512 patches"):
        plan_calls([100, 600], 2, BucketLadder((256, 512)))


@pytest.mark.parametrize("seed", range(5))
def test_every_image_gets_rows_of_its_own(seed):
    draw = np.random.default_rng(seed)
    sizes = [4 * int(n) for n in draw.integers(1, 120, draw.integers(1, 40))]
    lanes, ladder = int(draw.integers(1, 9)), BucketLadder((128, 512, 640))
    calls = plan_calls(sizes, lanes, ladder, max_call_patches=1500)
    assert [i for call in calls for i in call.images] == list(range(len(sizes)))
    for call in calls:
        rows = np.concatenate([call.token_rows(p, 4) for p in range(len(call.images))])
        assert len(rows) == len(set(rows.tolist())) == call.patches // 4
        assert rows.max() < lanes * call.capacity // 4
        assert all(
            start % 64 == 0 and start + align(size) <= call.capacity
            for start, size in zip(call.start, call.sizes, strict=True)
        )
        assert call.capacity in ladder.capacities


def test_patches_are_ordered_by_merge_block():
    want = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert [tuple(p) for p in merge_order(2, 4, 2).tolist()] == want


@pytest.mark.parametrize("grid", [(3, 4), (4, 5), (0, 4)])
def test_a_grid_of_partial_merge_blocks_is_refused(grid):
    with pytest.raises(ValueError, match=f"grid {grid[0]}x{grid[1]} is not made of whole 2x2 merge blocks"):
        merge_order(*grid, 2)


def test_the_layout_puts_each_image_at_its_place_and_leaves_padding_alone():
    grids = [(6, 10), (2, 40)]
    (plan,) = plan_calls([60, 80], 1, BucketLadder((256,)))

    def taps(gh, gw):
        return np.full((gh * gw, 1), gw, np.int32), np.full((gh * gw, 1), gh, np.float32)

    layout = lay_out(plan, grids, 2, 1, taps)
    assert (plan.start, plan.lane) == ((128, 0), (0, 0))
    assert layout.segments.first.tolist() == [[0, 0, 2, 3]]
    assert layout.segments.end.tolist() == [[80, 80, 188, 0]]
    np.testing.assert_array_equal(layout.positions[0, 128:188], merge_order(6, 10, 2))
    assert set(layout.tap_index[0, :80, 0].tolist()) == {40}
    assert not layout.tap_weight[0, 80:128].any()
    assert not layout.tap_weight[0, 188:].any()


def test_a_grid_that_does_not_match_its_size_is_refused():
    (plan,) = plan_calls([60], 1, BucketLadder((64,)))
    with pytest.raises(ValueError, match="planned with 60 patches but its grid is 4x4"):
        lay_out(plan, [(4, 4)], 2, 0, lambda gh, gw: (np.zeros(0), np.zeros(0)))
