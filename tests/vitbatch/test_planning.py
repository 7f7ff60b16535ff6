"""Host planning: lanes, calls, capacities and layout."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.vitbatch.geometry import tower
from vitbatch import Bucket, BucketLadder
from vitbatch.config import TINY_BLOCK, room
from vitbatch.images import smart_resize
from vitbatch.planning import assign_lanes, attention_cost, lay_out, merge_order, plan_call, plan_calls


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


def test_lanes_stay_short_where_no_image_needs_more():
    ladder = BucketLadder((256, 512, 1024))
    calls = plan_calls([256] * 6, 2, ladder, lane_patches=512)
    assert [(c.images, c.capacity) for c in calls] == [((0, 1, 2, 3), 512), ((4, 5), 256)]
    calls = plan_calls([1024, 900, 256, 256], 2, ladder, lane_patches=256)
    assert [(c.images, c.capacity) for c in calls] == [((0, 1), 1024), ((2, 3), 256)]


def test_tiny_images_share_tiny_lanes_and_large_ones_keep_theirs():
    ladder = BucketLadder((256, 1024, 4096), (256, 1024))
    (call,) = plan_calls([16] * 60, 1, ladder)
    assert (call.bucket, call.start[:3]) == (Bucket(1024, TINY_BLOCK), (0, 16, 32))
    # Of one patch block and of three: at least 16 patches of the lane, and no more than they have.
    (call,) = plan_calls([4] * 3 + [12] * 4, 1, ladder)
    assert (call.bucket, sorted(call.start)) == (Bucket(256, TINY_BLOCK), [0, 16, 32, 48, 64, 80, 96])
    (call,) = plan_calls([36] * 8 + [64], 2, ladder)
    assert (call.bucket, call.lane[:4], call.start[:4]) == (Bucket(256, TINY_BLOCK), (1, 1, 0, 1), (0, 36, 64, 72))
    calls = plan_calls([16] * 64 + [900], 1, ladder)
    assert [(len(c.images), c.bucket) for c in calls] == [(64, Bucket(1024, TINY_BLOCK)), (1, Bucket(1024))]
    # One call of 64 images costs less than four that would save nothing.
    (call,) = plan_calls([64] * 64, 1, ladder)
    assert call.bucket == Bucket(4096)


def test_lanes_that_do_not_fit_a_bucket_are_refused():
    with pytest.raises(ValueError, match="lanes of 128 patches do not fit the bucket 64"):
        plan_call([100], 1, Bucket(64))
    with pytest.raises(ValueError, match="lanes of 100 patches do not fit the bucket tiny/256"):
        plan_call([100], 1, Bucket(256, TINY_BLOCK))


def test_an_image_above_the_largest_bucket_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="600 patches exceed the largest bucket of 512 patches"):
        plan_calls([100, 600], 2, BucketLadder((256, 512)))


def test_a_split_that_computes_fewer_patches_is_preferred_to_one_large_call():
    ladder = BucketLadder((1024, 4096, 16_384))
    # One call would compute 16384 patches for 5120.
    calls = plan_calls([4096, 1024], 1, ladder)
    assert [(c.images, c.capacity) for c in calls] == [((0,), 4096), ((1,), 1024)]
    # One call costs less than the two that would save its padding.
    (call,) = plan_calls([960, 64], 2, BucketLadder((64, 960)))
    assert call.capacity == 960


def test_without_another_word_lanes_are_dealt_by_patches_and_otherwise_by_what_attention_costs():
    sizes = [4096] + [1024] * 6
    assert assign_lanes(sizes, 2).loads == [5120, 5120]
    dealt = assign_lanes(sizes, 2, quadratic=1 / 1024)
    assert dealt.lanes() == [[0], [1, 2, 3, 4, 5, 6]]


def test_attention_costs_less_of_a_wide_tower():
    wide, narrow = (attention_cost(tower(hidden_size=h, intermediate_size=4 * h)) for h in (1152, 384))
    assert wide == 1 / (6 * 1152)
    assert wide < narrow


def test_the_balance_of_lanes_is_told():
    (call,) = plan_calls([300, 100], 2, BucketLadder((320,)))
    assert call.imbalance == 1.5
    (call,) = plan_calls([64], 4, BucketLadder((64,)))
    assert call.imbalance == 4.0


# What people send: screens, cameras, phones, crops of them and thumbnails.
PHOTOGRAPHS = [
    (640, 480),
    (800, 600),
    (1024, 768),
    (1280, 720),
    (1024, 1024),
    (1920, 1080),
    (512, 512),
    (768, 1024),
    (3024, 4032),
    (1080, 1350),
    (750, 1334),
    (4032, 2268),
]


def photographs(count: int, max_pixels: int, seed: int) -> list[int]:
    """Patches of 16 px of so many photographs, in Qwen's resize rule."""
    draw = np.random.default_rng(seed)
    canvases = (
        smart_resize(h, w, factor=32, min_pixels=65_536, max_pixels=max_pixels)
        for w, h in (PHOTOGRAPHS[i] for i in draw.integers(0, len(PHOTOGRAPHS), count))
    )
    return [height * width // 256 for height, width in canvases]


@pytest.mark.parametrize(
    ("lanes", "max_tokens"),
    [(1, 16_384), (2, 16_384), (4, 16_384), (8, 16_384), (1, 4096), (2, 4096), (4, 4096), (8, 4096)],
)
def test_padding_of_64_mixed_photographs_stays_under_15_percent(lanes, max_tokens):
    ladder = BucketLadder.default(4 * max_tokens, least_top=8 * max_tokens)
    assert len(ladder.capacities) <= 14
    for seed in range(3):
        sizes = photographs(64, 1024 * max_tokens, seed)
        calls = plan_calls(sizes, lanes, ladder)
        padding = 1 - sum(sizes) / sum(call.lanes * call.capacity for call in calls)
        assert padding < 0.15, f"{padding:.3f} in {[(len(c.images), c.capacity) for c in calls]}"


def test_a_long_queue_is_planned_in_windows_without_losing_an_image():
    sizes = photographs(300, 1024 * 1024, 0)
    calls = plan_calls(sizes, 2, BucketLadder.default(4096))
    assert [i for call in calls for i in call.images] == list(range(300))
    # A window's last call is not closed where the window ends.
    assert 1 - sum(sizes) / sum(call.lanes * call.capacity for call in calls) < 0.15


@st.composite
def mixes(draw):
    """Image sizes of any mix, lanes, capacities that hold them and a budget."""
    lanes = draw(st.integers(1, 9))
    tokens = st.one_of(st.integers(1, 4), st.integers(1, 160), st.just(512))
    sizes = [4 * n for n in draw(st.lists(tokens, max_size=2 * lanes + 1))]
    capacities = {64 * n for n in draw(st.lists(st.integers(1, 40), max_size=5))} | {2048}
    budget = draw(st.none() | st.integers(1, 6000))
    quadratic = draw(st.sampled_from([0.0, 1 / 6000, 1.0]))
    lane_patches = draw(st.none() | st.integers(1, 3000))
    tiny = draw(st.sampled_from([(), (64,), (64, 256)]))
    return sizes, lanes, (tuple(sorted(capacities)), tiny), budget, quadratic, lane_patches


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(mixes())
@example(([2048] + [4] * 16, 8, ((64, 2048), ()), None, 0.0, None))  # one huge and many tiny
@example(([4] * 90 + [100], 2, ((64, 2048), (64, 256)), None, 0.0, None))
@example(([100, 4], 8, ((128, 2048), ()), None, 0.0, None))  # fewer images than lanes
def test_every_row_of_any_mix_comes_back_once_and_in_order(mix):
    sizes, lanes, capacities, budget, quadratic, lane_patches = mix
    ladder = BucketLadder(*capacities)
    calls = plan_calls(sizes, lanes, ladder, budget, quadratic, lane_patches)
    assert [i for call in calls for i in call.images] == list(range(len(sizes)))
    for call in calls:
        assert call.bucket in ladder.buckets
        assert max(call.sizes) <= call.bucket.longest
        assert call.sizes == tuple(sizes[i] for i in call.images)
        assert budget is None or call.patches <= budget or len(call.images) == 1
        rows = np.concatenate([call.token_rows(p, 4) for p in range(len(call.images))])
        assert len(rows) == len(set(rows.tolist())) == call.patches // 4
        assert rows.max() < lanes * call.capacity // 4
        for start, size in zip(call.start, call.sizes, strict=True):
            assert start % call.bucket.block == 0
            assert start + room(size, call.bucket.block) <= call.capacity


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 9000), max_size=40), st.integers(1, 9), st.sampled_from([0.0, 1e-3]))
def test_every_image_is_in_one_lane_and_no_lane_could_have_been_left_shorter(sizes, lanes, quadratic):
    dealt = assign_lanes(sizes, lanes, quadratic)
    assert sorted(dealt.order) == list(range(len(sizes)))
    assert dealt.loads == [sum(sizes[i] for i in lane) for lane in dealt.lanes()]
    costs = [sum(sizes[i] * (1 + quadratic * sizes[i]) for i in lane) for lane in dealt.lanes()]
    for lane in dealt.lanes():
        assert lane == sorted(lane, key=lambda i: (-sizes[i], i))
        if lane:
            # The last image of a lane went where the least was, so without it no lane holds less.
            last = sizes[lane[-1]] * (1 + quadratic * sizes[lane[-1]])
            assert costs[dealt.lanes().index(lane)] - last <= min(costs) + 1e-6


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


def test_the_layout_of_a_tiny_lane_has_blocks_of_4():
    plan = plan_call([36, 16], 1, Bucket(64, TINY_BLOCK))
    layout = lay_out(plan, [(6, 6), (4, 4)], 2, 0, lambda gh, gw: (np.zeros((gh * gw, 0)), np.zeros((gh * gw, 0))))
    assert layout.segments.first.tolist() == [[0] * 9 + [9] * 4 + [13, 14, 15]]
    assert layout.segments.end.tolist() == [[36] * 9 + [52] * 4 + [0] * 3]


def test_a_grid_that_does_not_match_its_size_is_refused():
    (plan,) = plan_calls([60], 1, BucketLadder((64,)))
    with pytest.raises(ValueError, match="planned with 60 patches but its grid is 4x4"):
        lay_out(plan, [(4, 4)], 2, 0, lambda gh, gw: (np.zeros(0), np.zeros(0)))
