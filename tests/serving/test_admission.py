"""How much may wait, and what a client is told when it is too much."""

from types import SimpleNamespace

import numpy as np
import pytest

from serving.admission import check_room
from serving.api.errors import overloaded
from serving.config import EngineConfig
from serving.protocol import ImageSpan, Overloaded, SamplingParams, Submission
from serving.sequence import Sequence

CONFIG = EngineConfig(max_model_len=100, max_seqs=2, max_queue=3, max_queue_tokens=150, max_held_image_bytes=1000)


def sequence(length=10, *, images=(), admitted=False):
    spans = tuple(ImageSpan(i, one) for i, one in enumerate(images))
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
    submission = Submission("r", [1] * length, spans, SamplingParams(5))
    return Sequence(submission, lambda event: None, positions, 0, 0, admitted=admitted)


def image(size):
    return SimpleNamespace(key=b"k", num_tokens=1, grid_thw=(1, 2, 2), patches=np.zeros(size, np.uint8))


def refusal_of(known, seq):
    with pytest.raises(Overloaded) as refusal:
        check_room(CONFIG, known, seq)
    assert refusal.value.reason == "queue_full"
    assert refusal.value.retry_after > 0
    return str(refusal.value)


def test_requests_that_wait_are_bounded_by_number():
    running = [sequence(admitted=True) for _ in range(2)]
    check_room(CONFIG, running + [sequence() for _ in range(2)], sequence())
    assert refusal_of(running + [sequence() for _ in range(3)], sequence()).startswith("5 requests")


def test_requests_that_wait_are_bounded_by_their_tokens_and_those_that_run_are_not():
    running = [sequence(95, admitted=True) for _ in range(2)]
    check_room(CONFIG, [*running, sequence(60)], sequence(90))
    assert refusal_of([*running, sequence(61)], sequence(90)) == "61 prompt tokens are waiting; try again"
    alone = EngineConfig(max_model_len=100, max_queue_tokens=50)
    check_room(alone, running, sequence(90))


def test_images_that_wait_are_bounded_by_their_bytes_and_choices_share_theirs():
    shared = image(600)
    check_room(CONFIG, [sequence(images=[shared])], sequence(images=[shared]))
    assert "images" in refusal_of([sequence(images=[shared])], sequence(images=[image(600)]))
    check_room(CONFIG, [], sequence(images=[image(5000)]))


@pytest.mark.parametrize(("reason", "status"), [("queue_full", 429), ("unavailable", 503)])
def test_a_full_queue_is_429_and_a_server_that_takes_nothing_is_503(reason, status):
    response = overloaded(Overloaded("too much", 1.4, reason)).response()
    assert response.status_code == status
    assert response.headers["retry-after"] == "1"


def test_the_default_bound_of_tokens_follows_the_bound_of_requests():
    assert EngineConfig(max_queue=10, max_model_len=1000).queue_tokens == 5000
    assert EngineConfig(max_queue=1, max_model_len=1000).queue_tokens == 1000
