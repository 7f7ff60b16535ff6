"""What the engine allocates for a layer's caches, and what a pass tells layers that keep a state a request."""

import numpy as np
import pytest

from serving.batch import Packer
from serving.config import STATE_CHUNK, EngineConfig
from serving.models.decoder import CacheArray
from serving.protocol import SamplingParams, Submission
from serving.scheduler import Chunk
from serving.sequence import NO_SEAT, Sequence

CONFIG = EngineConfig(max_model_len=200, page_size=8, max_seqs=4, prefill_tokens=320)


def seated(seat, length):
    submission = Submission(f"r{seat}", [1] * length, (), SamplingParams(1, temperature=0.0))
    seq = Sequence(submission, lambda event: None, np.zeros((3, length), np.int32), 0, seed=0)
    seq.seat = seat
    seq.add_pages(range(-(-length // CONFIG.page_size)))
    return seq


@pytest.mark.parametrize(
    ("array", "lead"),
    [
        (CacheArray((3, 5)), (11, 8)),
        (CacheArray((3, 5), every=4), (11, 2)),
        (CacheArray((3, 5), every=8), (11, 1)),
        (CacheArray((3, 5), per_request=True), (6,)),
    ],
)
def test_a_slot_belongs_to_a_token_to_several_or_to_a_request(array, lead):
    assert array.lead(pages=11, page_size=8, max_seqs=6) == lead


def test_a_page_is_a_whole_number_of_slots():
    with pytest.raises(ValueError, match="page_size is 8; this model keeps a cache slot for every 3 tokens"):
        CacheArray((5,), every=3).lead(11, 8, 6)
    for wrong in ({"every": 0}, {"every": 4, "per_request": True}):
        with pytest.raises(ValueError, match="a slot is for a request or for one or more tokens"):
            CacheArray((5,), **wrong)


def test_a_prefill_pass_tells_each_requests_seat_rows_and_what_came_before():
    parts = [(seated(2, 70), 0, 70), (seated(0, 99), 65, 99), (seated(NO_SEAT, 9), 0, 9)]
    step = Packer(CONFIG, 100, gather_pages=0).extend([Chunk(*part, STATE_CHUNK) for part in parts], 320)[2]
    np.testing.assert_array_equal(step.seats, [2, 0, 4, 4], "who has no seat, and nobody, write nowhere")
    np.testing.assert_array_equal(step.first_rows, [0, 128, 192, 0])
    np.testing.assert_array_equal(step.counts, [70, 34, 9, 0])
    np.testing.assert_array_equal(step.starts, [0, 65, 0, 0])
    assert (step.lengths > 0).sum() == 70 + 34 + 9
    np.testing.assert_array_equal(step.tile_request[::4], [0, 0, 1, 2, 0], "a chunk of 64 rows belongs to one request")


def test_a_decode_pass_tells_the_same_of_one_token_each():
    step = Packer(CONFIG, 100, gather_pages=0).decode([seated(3, 9), seated(1, 40)], 4)
    np.testing.assert_array_equal(step.seats, [3, 1, 4, 4])
    np.testing.assert_array_equal(step.first_rows, [0, 1, 2, 3])
    np.testing.assert_array_equal(step.counts, [1, 1, 0, 0])
    np.testing.assert_array_equal(step.starts, [8, 39, 0, 0])
