"""When the images of several requests share a call."""

import logging

import numpy as np
import pytest

from tests.vitbatch.pictures import noise
from vitbatch import batches_across_requests
from vitbatch.gate import decide_batching
from vitstripe.platform import Platform


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
        ("cpu", False, 8, True),
        ("cpu", True, 1, True),
        ("cpu", True, 2, True),
        ("npu", True, 8, False),
        ("xpu", True, 8, False),
        ("tpu", True, 8, False),
    ],
)
def test_when_images_of_several_requests_share_a_call(platform, dp_encoder, tp, batched):
    assert batches_across_requests(platform, dp_encoder=dp_encoder, tp=tp) is batched


@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu", "xpu"])
def test_always_and_never_overrule_the_platform(platform):
    for dp_encoder, tp in ((True, 1), (False, 4)):
        assert batches_across_requests(platform, dp_encoder=dp_encoder, tp=tp, batching="always")
        assert not batches_across_requests(platform, dp_encoder=dp_encoder, tp=tp, batching="never")


def test_every_decision_says_why_and_where():
    reasons = [
        decide_batching(platform, dp_encoder=dp, tp=tp).reason
        for platform, dp, tp in (("cuda", False, 1), ("rocm", True, 2), ("rocm", True, 1), ("rocm", False, 2))
    ]
    assert len({reason.split(" (")[0] for reason in reasons}) == 4
    assert reasons[3].endswith("(rocm, data-parallel encoder off, tp 2)")


def test_a_mesh_of_no_devices_has_no_gate():
    with pytest.raises(ValueError, match="tp is 0"):
        batches_across_requests("cuda", dp_encoder=True, tp=0)


def test_an_encoder_decides_when_asked_and_logs_each_answer_once(encoder_of, monkeypatch, caplog):
    encoder = encoder_of(1, (512,), pool_tokens=64)
    with caplog.at_level(logging.INFO, "vitbatch.encoder"):
        assert [encoder.batches_requests() for _ in range(3)] == [True] * 3
        monkeypatch.setattr("vitbatch.encoder.platform_of_mesh", lambda mesh: Platform("rocm", "gfx950", "MI355X"))
        assert [encoder.batches_requests() for _ in range(3)] == [False] * 3
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("images of several requests are encoded in one call: ")
    assert messages[1].startswith("images of several requests are encoded request by request: one device leaves")


@pytest.mark.parametrize("batching", ["always", "never"])
def test_both_paths_give_each_request_its_rows(encoder_of, batching, monkeypatch):
    encoder = encoder_of(2, (512,), batching=batching)
    requests = [[noise(64, 64, 0)], [], [noise(100, 70, 1), noise(64, 64, 0)]]
    calls = []
    monkeypatch.setattr(encoder, "_dispatch", lambda *args: calls.append(args[0]) or dispatch(*args))
    dispatch = type(encoder)._dispatch.__get__(encoder)
    got = encoder.encode_requests(requests)
    assert len(calls) == (1 if batching == "always" else 2)
    assert [len(rows) for rows in got] == [1, 0, 2]
    for images, rows in zip(requests, got, strict=True):
        for image, own in zip(images, rows, strict=True):
            np.testing.assert_array_equal(own, encoder.encode([image])[0])
