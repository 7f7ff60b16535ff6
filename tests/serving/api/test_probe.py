"""/health_generate: one token by the way that every request takes."""

import pytest

from serving.api import Limits
from serving.metrics import Metrics
from serving.protocol import ErrorEvent, Overloaded, SamplingParams
from tests.serving.api.harness import FakeEngine, app_of, call, error_of, silent

PATH = "/health_generate"


def test_a_working_engine_makes_a_token():
    engine, metrics = FakeEngine(), Metrics()
    body = call(app_of(engine, metrics=metrics), "GET", PATH).json()
    assert body["status"] == "alive"
    assert body["seconds"] >= 0
    [submission] = engine.submissions
    assert submission.params == SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    assert len(submission.prompt_ids) == 1
    assert metrics.registry.get_sample_value("vitstripe_request_finished_total", {"reason": "length"}) == 0


def test_an_engine_that_says_nothing_is_given_up_and_the_probe_aborted():
    engine = FakeEngine(script=silent)
    response = call(app_of(engine, limits=Limits(probe_seconds=0.05)), "GET", PATH)
    assert response.status_code == 503
    assert "no token within 0.05 s" in error_of(response)["message"]
    assert engine.aborted == [engine.submissions[0].request_id]


@pytest.mark.parametrize(
    ("engine", "status"),
    [
        (FakeEngine(refuse=Overloaded("full", reason="queue_full")), 429),
        (FakeEngine(script=lambda submission, send, stopped: send(ErrorEvent("internal", "secret"))), 503),
        (FakeEngine(state="draining"), 503),
        (FakeEngine(state="dead"), 503),
    ],
)
def test_a_probe_that_fails_says_so_without_details(engine: FakeEngine, status: int):
    response = call(app_of(engine), "GET", PATH)
    assert response.status_code == status
    assert "secret" not in response.text
