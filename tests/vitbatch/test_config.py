"""The ladder, the encoder's limits and the gate."""

import pytest

from vitbatch import BucketLadder, EncoderConfig, batches_across_requests


def test_the_default_ladder_doubles_up_to_the_largest_image():
    assert BucketLadder.default(65536).capacities == (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert BucketLadder.default(4100).largest == 8192
    assert BucketLadder.default(300).capacities == (256, 512, 1024)


def test_the_default_ladder_ends_at_its_cap():
    assert BucketLadder.default(65536, max_capacity=1536).capacities == (256, 512, 1024, 1536)


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


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="pool_tokens is 0"):
        EncoderConfig(pool_tokens=0)
    with pytest.raises(ValueError, match="min_pixels 9 is over max_image_pixels 4"):
        EncoderConfig(min_pixels=9, max_image_pixels=4)


@pytest.mark.parametrize(
    ("platform", "dp_encoder", "tp", "batched"),
    [
        ("cuda", False, 1, True),
        ("cuda", True, 1, True),
        ("cuda", False, 8, True),
        ("rocm", False, 1, False),
        ("rocm", False, 8, False),
        ("rocm", True, 1, False),
        ("rocm", True, 2, True),
        ("cpu", False, 8, False),
        ("cpu", True, 1, False),
        ("cpu", True, 2, True),
        ("npu", True, 8, False),
        ("xpu", True, 8, False),
        ("tpu", True, 8, False),
    ],
)
def test_when_images_of_several_requests_share_a_call(platform, dp_encoder, tp, batched):
    assert batches_across_requests(platform, dp_encoder=dp_encoder, tp=tp) is batched


def test_a_mesh_of_no_devices_has_no_gate():
    with pytest.raises(ValueError, match="tp is 0"):
        batches_across_requests("cuda", dp_encoder=True, tp=0)
