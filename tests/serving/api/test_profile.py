"""Traces of the running server, started and stopped over HTTP."""

import time
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import pytest

from serving.api.keys import Keys
from serving.handle import EngineHandle
from serving.profiling import Profiler, ProfilerBusy
from tests.serving.api.harness import FakeEngine, app_of, call, chat, error_of

KEYS = Keys(admin="admin")


def control(app, path: str, method: str = "POST", **request: Any) -> httpx.Response:
    return call(app, method, path, headers={"Authorization": "Bearer admin"}, **request)


@pytest.fixture
def app(tmp_path):
    profiler = Profiler(tmp_path / "traces")
    yield app_of(FakeEngine("ok"), keys=KEYS, profiler=profiler)
    profiler.close()


def test_a_trace_is_started_stopped_and_listed_and_requests_go_on(app, tmp_path):
    assert control(app, "/profile_status", "GET").json() == {"running": None}
    started = control(app, "/start_profile").json()
    assert started["status"] == "started"
    assert control(app, "/profile_status", "GET").json() == {"running": started["trace"]}
    jax.block_until_ready(jnp.arange(7.0) * 3)
    assert chat(app).status_code == 200
    stopped = control(app, "/stop_profile").json()
    assert stopped["trace"] == started["trace"]
    assert any(file["path"].endswith(".xplane.pb") and file["bytes"] > 0 for file in stopped["files"])
    for file in stopped["files"]:
        assert (tmp_path / "traces" / file["path"]).stat().st_size == file["bytes"]
    assert stopped["device_events"] or "no device recorded" in stopped["note"]
    assert chat(app).status_code == 200


def test_starting_or_stopping_twice_is_a_conflict_that_changes_nothing(app):
    assert control(app, "/stop_profile").status_code == 409
    trace = control(app, "/start_profile").json()["trace"]
    again = control(app, "/start_profile")
    assert (again.status_code, error_of(again)["code"]) == (409, "profiler_busy")
    assert trace in error_of(again)["message"]
    assert control(app, "/stop_profile").json()["trace"] == trace
    assert control(app, "/stop_profile").status_code == 409
    assert control(app, "/start_profile").status_code == 200


def test_where_traces_go_is_never_the_clients_to_choose(app, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    response = control(app, "/start_profile", json={"output_dir": str(elsewhere)})
    assert (response.status_code, error_of(response)["param"]) == (400, "output_dir")
    assert control(app, "/profile_status", "GET").json() == {"running": None}
    assert (
        control(app, "/start_profile", json={"model": "m", "prompt": "as benchmark clients send it"}).status_code == 200
    )
    assert not elsewhere.exists()


def test_a_forgotten_trace_ends_by_itself(tmp_path):
    profiler = Profiler(tmp_path, limit=0.05)
    profiler.start()
    deadline = time.monotonic() + 20
    while profiler.running is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(ProfilerBusy):
        profiler.stop()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_trace_begins_and_ends_when_the_engine_allows_it(tmp_path):
    allowed: list[str] = []

    def quietly(work):
        if len(allowed) == 1:
            allowed.append("too busy")
            raise TimeoutError
        allowed.append("ran")
        work()

    profiler = Profiler(tmp_path, quietly=quietly)
    name = profiler.start()
    with pytest.raises(ProfilerBusy, match="try again"):
        profiler.stop()
    assert profiler.running == name, "it runs on and can be stopped later"
    assert profiler.stop().name == name
    assert allowed == ["ran", "too busy", "ran"]


def test_a_trace_that_cannot_be_written_is_over(tmp_path):
    profiler = Profiler(tmp_path)
    profiler.start()
    jax.profiler.stop_trace()  # by somebody else
    with pytest.raises(ProfilerBusy, match="lost"):
        profiler.stop()
    assert profiler.running is None
    name = profiler.start()
    assert profiler.stop().name == name


def test_a_forgotten_trace_ends_later_when_the_engine_was_too_busy_at_its_limit(tmp_path):
    refused: list[float] = []

    def quietly(work):
        if profiler.running is not None and len(refused) < 2:
            refused.append(time.monotonic())
            raise TimeoutError
        work()

    profiler = Profiler(tmp_path, limit=0.05, quietly=quietly)
    profiler.start()
    deadline = time.monotonic() + 20
    while profiler.running is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(refused) == 2


def test_no_trace_begins_while_the_server_warms_up(tmp_path):
    handle = EngineHandle(model_name="m", max_model_len=64, eos_ids=frozenset())
    profiler = Profiler(tmp_path, quietly=handle.between_steps)
    with pytest.raises(ProfilerBusy, match="starting"):
        profiler.start()
    assert profiler.running is None


def test_a_folder_or_limit_that_cannot_work_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be made"):
        Profiler(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="must be positive"):
        Profiler(tmp_path, limit=0.0)
