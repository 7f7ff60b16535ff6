"""The ladder and the encoder's limits."""

import pytest

from tests.vitbatch.geometry import tower
from vitbatch import BucketLadder, EncoderConfig
from vitbatch.config import activation_bytes


def test_a_chosen_ladder_doubles_and_then_halves_its_widest_steps():
    ladder = BucketLadder.default(65_536, least_top=131_072)
    assert ladder.capacities[:8] == (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    assert ladder.capacities[8:] == (49_152, 65_536, 81_920, 98_304, 114_688, 131_072)
    assert ladder.tiny == ()
    assert BucketLadder.default(4096).capacities == (256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)


def test_where_tiny_images_may_come_two_buckets_are_for_them_and_a_third_if_there_is_room():
    ladder = BucketLadder.default(65_536, least_top=131_072, smallest_image_patches=16)
    assert ladder.tiny == (256, 1024)
    assert [str(bucket) for bucket in ladder.buckets[:3]] == ["tiny/256", "tiny/1024", "256"]
    assert len(ladder.buckets) == 14
    assert BucketLadder.default(4096, smallest_image_patches=16).tiny == (256, 384, 1024)
    assert BucketLadder.default(200, 192, smallest_image_patches=16).tiny == ()


@pytest.mark.parametrize("largest", [1, 300, 1369, 8160, 32_000, 65_536, 10_000_000])
@pytest.mark.parametrize("memory", [None, 64, 320, 5056, 40_000, 262_144])
def test_a_chosen_ladder_holds_the_largest_image_or_what_memory_allows(largest, memory):
    ladder = BucketLadder.default(largest, memory)
    assert len(ladder.capacities) <= 14
    assert ladder.largest == memory or ladder.largest >= largest
    assert memory is None or ladder.largest <= memory


def test_small_images_share_the_lane_that_is_asked_for():
    assert BucketLadder.default(256, least_top=2000).largest == 2048
    assert BucketLadder.default(256, 512, least_top=2000).capacities == (256, 384, 512)


def test_the_memory_estimate_grows_with_every_part_of_a_tower():
    def estimate(lanes=1, itemsize=4, **changes):
        return activation_bytes(tower(**changes), itemsize, lanes)

    grown = [estimate(2), estimate(itemsize=8), estimate(hidden_size=96), estimate(intermediate_size=100)]
    grown += [estimate(out_hidden_size=68), estimate(patch_size=18), estimate(deepstack_indexes=(0,))]
    assert min(grown) > estimate()


def test_the_smallest_bucket_that_fits_is_taken():
    ladder = BucketLadder((256, 384))
    assert [ladder.bucket_for(n) for n in (1, 256, 257, 384)] == [256, 256, 384, 384]
    with pytest.raises(ValueError, match="385 patches exceed the largest bucket of 384 patches"):
        ladder.bucket_for(385)


@pytest.mark.parametrize(
    ("capacities", "message"),
    [
        ((), "at least one"),
        ((100,), "100 is not a multiple of 64"),
        ((128, 64), "must ascend"),
        ((64, 64), "must ascend"),
        ((0,), "is 0"),
    ],
)
def test_a_broken_ladder_is_refused(capacities, message):
    with pytest.raises(ValueError, match=message):
        BucketLadder(capacities)
    if capacities:
        with pytest.raises(ValueError, match=message):
            BucketLadder((64,), capacities)


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="pool_tokens is 0"):
        EncoderConfig(pool_tokens=0)
    with pytest.raises(ValueError, match="min_pixels 9 is over max_image_pixels 4"):
        EncoderConfig(min_pixels=9, max_image_pixels=4)
    with pytest.raises(ValueError, match="memory_bytes is -1"):
        EncoderConfig(memory_bytes=-1)
    with pytest.raises(ValueError, match="pool_tokens and pool_bytes are both set"):
        EncoderConfig(pool_tokens=9, pool_bytes=9)
    with pytest.raises(ValueError, match="batching is 'sometimes'; it must be one of auto, always, never"):
        EncoderConfig(batching="sometimes")
