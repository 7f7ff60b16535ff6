"""Host planning of the engine: positions, pages, chunks, buckets."""

import numpy as np
import pytest

from serving.config import ROW_TILE, EngineConfig, bucket_for
from serving.pages import PageAllocator
from serving.positions import mrope_positions
from serving.protocol import SamplingParams, Submission
from serving.scheduler import Scheduler
from serving.sequence import Sequence

CONFIG = EngineConfig(max_model_len=120, page_size=8, max_seqs=3, prefill_tokens=48)


def sequence(order, length, generated=0):
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
    submission = Submission(str(order), list(range(1, length + 1)), (), SamplingParams(9))
    seq = Sequence(submission, lambda event: None, positions, 0, 0, order=order)
    seq.tokens += [0] * generated
    return seq


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
    pages = PageAllocator(5)
    first, second = pages.take(3), pages.take(2)
    assert sorted(first + second) == list(range(5))
    assert pages.take(1) is None
    pages.give_back(first)
    assert pages.free == 3
    with pytest.raises(RuntimeError, match="is not in use"):
        pages.give_back(first[:1])


def test_prefill_takes_the_oldest_first_and_cuts_the_last_chunk_to_the_budget():
    scheduler = Scheduler(CONFIG, 100)
    for order, length in enumerate((20, 30, 5)):
        scheduler.add(sequence(order, length))
    scheduler.admit()
    chunks = scheduler.prefill()
    # 20 tokens take two row tiles, which leaves one tile of the 48 rows
    assert [(c.seq.order, c.start, c.stop, c.rows) for c in chunks] == [(0, 0, 20, 32), (1, 0, 16, 16)]
    assert [c.finishes_prompt for c in chunks] == [True, False]
    assert sum(c.rows for c in chunks) <= CONFIG.prefill_tokens
    assert all(c.rows % ROW_TILE == 0 for c in chunks)


def test_the_key_gather_bounds_what_shares_a_pass():
    scheduler = Scheduler(CONFIG, 100, gather_pages=4)
    for order, length in enumerate((16, 17, 3)):
        scheduler.add(sequence(order, length))
    scheduler.admit()
    # 2 pages, then 3 would be over 4: the second waits rather than be overtaken
    assert [c.seq.order for c in scheduler.prefill()] == [0]


def test_the_youngest_gives_way_when_pages_run_out_and_comes_back_first():
    scheduler = Scheduler(CONFIG, 4)
    old, young, late = sequence(0, 16), sequence(1, 15), sequence(2, 8)
    for seq in (old, young, late):
        scheduler.add(seq)
    scheduler.admit()
    assert [s.order for s in scheduler.running] == [0, 1]
    for seq in (old, young):
        seq.computed = len(seq.tokens)
        seq.tokens.append(7)
    due, preempted = scheduler.decode()
    assert ([s.order for s in due], [s.order for s in preempted]) == ([0], [1])
    assert scheduler.preemptions == 1
    assert [s.order for s in scheduler.waiting] == [1, 2]
    assert (young.pages, young.computed, len(young.tokens)) == ([], 0, 16)
    scheduler.remove(old)
    scheduler.admit()
    assert [s.order for s in scheduler.running] == [1, 2]
    for seq in (young, late):
        scheduler.remove(seq)
    assert scheduler.pages.used == 0


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
        ({"merge": "sum"}, "merge is 'sum'; it must be 'pmax' or 'all_gather'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(fields, text):
    with pytest.raises(ValueError, match=text):
        EngineConfig(**fields)
