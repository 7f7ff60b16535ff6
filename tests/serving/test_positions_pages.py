"""Host planning of the engine: positions, pages, buckets. test_scheduler.py has the order of requests."""

import numpy as np
import pytest

from serving.config import EngineConfig, bucket_for
from serving.pages import PagePool
from serving.positions import mrope_positions


def test_a_text_prompt_counts_up_on_every_axis():
    positions, delta = mrope_positions(7, [], merge=2)
    np.testing.assert_array_equal(positions, np.tile(np.arange(7), (3, 1)))
    assert delta == 0


def test_an_image_moves_the_cursor_by_its_longer_side():
    # two text tokens, a 3 x 5 image (merged), one text token
    positions, delta = mrope_positions(18, [(2, (1, 6, 10))], merge=2)
    np.testing.assert_array_equal(positions[:, :2], [[0, 1]] * 3)
    np.testing.assert_array_equal(positions[0, 2:17], np.full(15, 2))
    np.testing.assert_array_equal(positions[1, 2:17], np.repeat([2, 3, 4], 5))
    np.testing.assert_array_equal(positions[2, 2:17], np.tile([2, 3, 4, 5, 6], 3))
    np.testing.assert_array_equal(positions[:, 17], [7, 7, 7])
    assert delta == 8 - 18


def test_frames_of_one_item_count_up_in_time():
    positions, _ = mrope_positions(8, [(0, (2, 4, 4))], merge=2)
    np.testing.assert_array_equal(positions[0], [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(positions[2], [0, 1, 0, 1, 0, 1, 0, 1])


def test_pages_are_handed_out_once_and_taken_back_once():
    pages = PagePool(5)
    first, second = pages.take(3), pages.take(2)
    assert sorted(first + second) == list(range(5))
    assert pages.take(1) is None
    pages.check([first, second])
    pages.give_back(first)
    assert (pages.free, pages.used) == (3, 2)
    with pytest.raises(RuntimeError, match="is not in use"):
        pages.give_back(first[:1])
    pages.check([second])


def test_a_leaked_page_fails_the_check():
    pages = PagePool(5)
    held = pages.take(3)
    with pytest.raises(RuntimeError, match=f"page {min(held)}: 1 counted, 0 real"):
        pages.check([])
    with pytest.raises(RuntimeError, match="1 counted, 2 real"):
        pages.check([held, held[:1]])


def test_a_known_page_is_shared_and_outlives_its_holders():
    pages = PagePool(4)
    first, second = pages.take(2)
    pages.publish(first, b"a")
    pages.publish(second, b"b")
    assert pages.share(b"a") == first
    pages.give_back([first, second])
    assert (pages.used, pages.kept, pages.free) == (1, 1, 3)
    pages.give_back([first])
    assert (pages.used, pages.kept) == (0, 2)
    assert pages.share(b"b") == second
    assert pages.share(b"c") is None
    pages.check([[second]])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning_and_the_oldest_before_the_newest():
    pages = PagePool(5)
    old, new = pages.take(2), pages.take(2)
    for page, key in zip(old + new, (b"a1", b"a2", b"b1", b"b2"), strict=True):
        pages.publish(page, key)
    pages.give_back(old)
    pages.give_back(new)
    assert pages.take(2) is not None, "one free page and one of the oldest prefix"
    assert [key in pages for key in (b"a1", b"a2", b"b1", b"b2")] == [True, False, True, True]
    assert pages.take(1) == [old[0]]
    assert pages.take(1) == [new[1]]
    assert pages.evictions == 3


def test_a_page_that_was_published_cannot_become_another_content():
    pages = PagePool(3)
    first, second = pages.take(2)
    pages.publish(first, b"a")
    with pytest.raises(RuntimeError, match="must not be written"):
        pages.publish(first, b"b")
    pages.publish(second, b"a")
    assert pages.share(b"a") == first, "the first page with a content stays the one that is found"
    pages.forget([first])
    assert pages.share(b"a") is None
    pages.check([[first, second], [first]])


def test_buckets_ascend_and_hold_everything_up_to_the_limit():
    config = EngineConfig(prefill_tokens=1024, max_seqs=12)
    assert config.token_buckets == (64, 256, 1024)
    assert config.batch_buckets == (1, 3, 12)
    assert [bucket_for(config.token_buckets, n) for n in (1, 64, 65, 1024)] == [64, 64, 256, 1024]
    with pytest.raises(ValueError, match="1025 is over the largest bucket 1024"):
        bucket_for(config.token_buckets, 1025)
    assert EngineConfig(prefill_tokens=48).token_buckets == (48,)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tp": 0}, "tp is 0; it must be at least 1"),
        ({"prefill_tokens": 100}, "prefill_tokens is 100; it must be a multiple of 16"),
        ({"cache_tokens": 100, "max_model_len": 101}, "less than max_model_len 101"),
        ({"max_queue_tokens": 0}, "max_queue_tokens is 0; it must be at least 1"),
        ({"step_seconds": 0.0}, "step_seconds is 0.0; it must be a positive number"),
        ({"merge": "sum"}, "merge is 'sum'; it must be 'pmax' or 'all_gather'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(fields, text):
    with pytest.raises(ValueError, match=text):
        EngineConfig(**fields)
