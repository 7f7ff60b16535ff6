"""What the engine tells, in order and once, and that one receiver's fault stays its own. When: in test_engine.py."""

import logging

import numpy as np

from serving.outbox import Outbox
from serving.protocol import FinishEvent, SamplingParams, Submission, TokenEvent, Usage
from serving.sequence import Sequence

FINISH = FinishEvent("stop", Usage(3, 2, 0, cached_tokens=0), ())


def sequence(name, on_event):
    positions = np.broadcast_to(np.arange(3, dtype=np.int32), (3, 3))
    return Sequence(Submission(name, [5, 6, 7], (), SamplingParams(max_tokens=9)), on_event, positions, 0, seed=1)


def test_events_come_in_order_once_and_none_after_the_last():
    told, box = [], Outbox()
    a, b = (sequence(name, lambda event, name=name: told.append((name, event))) for name in "ab")
    box.put(a, TokenEvent(11))
    box.put(b, TokenEvent(21))
    box.put(a, FINISH)
    box.put(a, TokenEvent(12))
    assert not told, "nothing is told before it is delivered"
    assert box.deliver() == []
    assert told == [("a", TokenEvent(11)), ("b", TokenEvent(21)), ("a", FINISH)]
    box.put(b, TokenEvent(22))
    assert box.deliver() == []
    assert told[3:] == [("b", TokenEvent(22))]


def test_a_receiver_that_raises_is_named_and_the_others_are_told(caplog):
    told, box = [], Outbox()

    def broken(event):
        raise ValueError("gone")

    bad, over, good = sequence("bad", broken), sequence("over", broken), sequence("good", told.append)
    for token in (31, 32):
        box.put(bad, TokenEvent(token))
        box.put(good, TokenEvent(token))
    box.put(over, FINISH)
    with caplog.at_level(logging.ERROR, "serving.outbox"):
        assert box.deliver() == [bad], "one that is over needs no end"
    assert told == [TokenEvent(31), TokenEvent(32)]
    assert "bad" in caplog.text
    assert "over" in caplog.text
