"""Who may ask what: API keys, the admin key, and what is open."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from serving.api.keys import Keys
from serving.metrics import Metrics
from tests.serving.api.harness import FakeEngine, app_of, call, error_of

API, ADMIN = "sk-client-1", "sk-admin"
BOTH = Keys(frozenset({API, "sk-client-2"}), ADMIN)
CHAT = {"json": {"messages": [{"role": "user", "content": "hi"}]}}


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_and_metrics_need_no_key(path: str):
    assert call(app_of(FakeEngine(), keys=BOTH), "GET", path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("sk-client"), bearer(ADMIN), bearer(API, "Basic"), {"Authorization": API}, bearer("é" * 9)],
)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", {"content": b"not even JSON"}),
        ("GET", "/v1/models", {}),
        ("GET", "/health_generate", {}),
        ("GET", "/openapi.json", {}),
        ("GET", "/nowhere", {}),
    ],
)
def test_without_the_right_key_nothing_is_done(method: str, path: str, body: dict, headers: dict[str, str]):
    engine = FakeEngine()
    encoded = {name: value.encode() for name, value in headers.items()}
    response = call(app_of(engine, keys=BOTH), method, path, headers=encoded, **body)
    error = error_of(response)
    assert (response.status_code, error["code"], response.headers["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )
    assert engine.submissions == []


@pytest.mark.parametrize("headers", [bearer(API), bearer("sk-client-2"), bearer(API, "bearer")])
def test_any_of_the_api_keys_opens_the_model(headers: dict[str, str]):
    app = app_of(FakeEngine(), keys=BOTH)
    assert call(app, "POST", "/v1/chat/completions", headers=headers, **CHAT).status_code == 200
    assert call(app, "GET", "/nowhere", headers=headers).status_code == 404


def test_a_route_that_was_added_is_not_open_by_accident():
    route = Route("/extra", lambda request: PlainTextResponse("ok"))
    app = app_of(FakeEngine(), keys=BOTH, extra_routes=[route])
    assert call(app, "GET", "/extra").status_code == 401
    assert call(app, "GET", "/extra", headers=bearer(API)).text == "ok"


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_control_routes_take_the_admin_key_alone(path: str):
    app = app_of(FakeEngine(), keys=BOTH)
    for headers in ({}, bearer(API), bearer("wrong")):
        assert call(app, "POST", path, headers=headers).status_code == 401
    response = call(app, "POST", path, headers=bearer(ADMIN))
    assert (response.status_code, error_of(response)["code"]) == (404, "profiling_off")


@pytest.mark.parametrize("keys", [None, Keys(frozenset({API}))])
def test_without_an_admin_key_control_routes_are_closed_to_everybody(keys: Keys | None):
    response = call(app_of(FakeEngine(), keys=keys), "POST", "/start_profile", headers=bearer(API))
    assert response.status_code == 403
    assert "without an admin key" in error_of(response)["message"]


@pytest.mark.parametrize("keys", [None, BOTH])
def test_a_line_break_behind_its_path_does_not_open_a_control_route(keys: Keys | None):
    response = call(app_of(FakeEngine(), keys=keys), "POST", "/start_profile%0A", headers=bearer(API))
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_refusals_are_counted_and_logged_by_route(caplog):
    metrics = Metrics()
    with caplog.at_level("INFO"):
        call(app_of(FakeEngine(), keys=BOTH, metrics=metrics), "GET", "/v1/models", headers=bearer("sk-guess"))
    labels = {"route": "/v1/models", "code": "401"}
    assert metrics.registry.get_sample_value("vitstripe_http_responses_total", labels) == 1
    assert "sk-guess" not in caplog.text


def test_keys_come_from_a_flag_a_file_or_the_environment_in_that_order(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo\n")
    environ = {"VITSTRIPE_API_KEY": "env", "VITSTRIPE_ADMIN_KEY": "admin"}
    assert Keys.read(environ, api="flag", api_file=str(file)).api == {"flag"}
    assert Keys.read(environ, api_file=str(file)).api == {"one", "two"}
    assert Keys.read(environ) == Keys(frozenset({"env"}), "admin")
    assert Keys.read({}) == Keys()


def test_keys_that_cannot_work_are_refused_without_being_shown(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for bad in ("", "two words", "ключ", "x" * 513):
        with pytest.raises(ValueError, match="visible ASCII") as caught:
            Keys(frozenset({bad}))
        assert not bad or bad not in str(caught.value)
    with pytest.raises(ValueError, match="also an API key"):
        Keys(frozenset({"same"}), "same")
    with pytest.raises(ValueError, match="is empty"):
        Keys.read({}, api_file=str(empty))
    with pytest.raises(ValueError, match="cannot be read"):
        Keys.read({}, admin_file=str(tmp_path / "absent"))
    assert API not in repr(BOTH)
    assert ADMIN not in repr(BOTH)
