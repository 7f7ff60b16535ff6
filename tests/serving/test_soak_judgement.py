"""What the soak counts as an end, and what it holds against a server: a harness that sees no fault proves nothing."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from scripts.lib.mixed_traffic import CHAT, Clients, Job, Mix, Tally
from scripts.lib.server_process import HELD, leaks
from scripts.lib.soak import Report, slope_per_minute
from serving.metrics import Metrics
from tests.serving.api.harness import FakeEngine, app_of, silent

ASK = Job("chat", CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20})


def end_of(job: Job, transport: httpx.AsyncBaseTransport, *, stopping: bool = False) -> Tally:
    """How one job ends."""

    async def run() -> Tally:
        clients = Clients("http://server", Tally(), transport)
        clients.stopping = stopping
        async with asyncio.timeout(10):
            await clients.run(job)
        await clients.close()
        return clients.tally

    tally = asyncio.run(run())
    assert sum(tally.ends.values()) == 1, "each request has exactly one end"
    return tally


def answers(status: int, body: str | dict, **headers: str) -> httpx.MockTransport:
    text = body if isinstance(body, str) else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.MockTransport(lambda request: httpx.Response(status, text=text, headers=named))


@pytest.mark.parametrize("stream", [False, True])
def test_a_real_answer_counts_as_answered(stream):
    job = replace(ASK, body=ASK.body | {"stream": stream})
    tally = end_of(job, httpx.ASGITransport(app_of(FakeEngine("hello"))))
    assert tally.ends == {"answered": 1}
    assert tally.tokens == len("hello") + 1
    assert not tally.problems


def test_a_right_and_a_wrong_digit_are_told_apart():
    app = httpx.ASGITransport(app_of(FakeEngine("7")))
    assert end_of(replace(ASK, answer="7"), app).right == 1
    assert end_of(replace(ASK, answer="3"), app).wrong == 1


def test_a_client_that_leaves_is_an_end_of_its_own():
    app = httpx.ASGITransport(app_of(FakeEngine(script=silent)))
    assert end_of(replace(ASK, leave_after=0.1), app).ends == {"client left": 1}


def test_a_bad_image_must_be_refused():
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    bad = replace(ASK, body={"messages": [{"role": "user", "content": content}]}, bad=True)
    assert end_of(bad, httpx.ASGITransport(app_of(FakeEngine()))).ends == {"refused: bad image": 1}
    assert end_of(replace(ASK, bad=True), httpx.ASGITransport(app_of(FakeEngine()))).ends == {"LOST": 1}


CHUNK = 'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": %s}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (CHUNK % "null" + USAGE, "0 [DONE]"),
        (CHUNK % '"stop"' + USAGE, "0 [DONE]"),
        (CHUNK % '"stop"' + USAGE + DONE + DONE, "2 [DONE]"),
        (CHUNK % "null" + USAGE + DONE, "ended as {}"),
        (CHUNK % '"abort"' + USAGE + DONE, "ended as {0: 'abort'}"),
        (CHUNK % '"stop"' + CHUNK % '"stop"' + USAGE + DONE, "ended twice"),
        (CHUNK % '"stop"' + DONE, "without tokens"),
        ('data: {"error": {"message": "broken"}}\n\n', "error event: broken"),
    ],
)
def test_a_stream_that_ends_in_no_order_is_found(stream, why):
    tally = end_of(replace(ASK, body=ASK.body | {"stream": True}), answers(200, stream))
    assert any(why in problem for problem in tally.problems), tally.problems


@pytest.mark.parametrize(
    ("transport", "why"),
    [
        (answers(500, "{}"), "status 500"),
        (answers(429, "{}"), "Retry-After ''"),
        (answers(503, "{}", Retry_After="soon"), "Retry-After 'soon'"),
        (answers(200, {"choices": [], "usage": {"completion_tokens": 0}}), "1 choices were asked for"),
    ],
)
def test_a_fault_of_the_server_is_lost_and_named(transport, why):
    tally = end_of(ASK, transport)
    assert tally.ends == {"LOST": 1}
    assert any(why in problem for problem in tally.problems), tally.problems


def test_a_busy_server_is_asked_again_after_the_time_it_named():
    turns = iter([httpx.Response(429, headers={"retry-after": "1"}, json={})])

    async def handle(request: httpx.Request) -> httpx.Response:
        body = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        return next(turns, httpx.Response(200, json=body))

    tally = end_of(ASK, httpx.MockTransport(handle))
    assert (tally.busy, dict(tally.ends)) == (1, {"answered": 1})


def test_a_refusal_of_a_stopping_server_is_final():
    assert end_of(ASK, answers(503, "{}"), stopping=True).ends == {"refused: the server was stopping": 1}


def good() -> Report:
    return Report(10.0, requests=5, ends={"answered": 4, "client left": 1}, slope_mib=0.4, exit_code=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"requests": 6}, "6 requests were sent and 5 ended"),
        ({"ends": {"answered": 4, "LOST": 1}}, "lost"),
        ({"ends": {"client left": 5}}, "nothing was answered"),
        ({"digits_wrong": 1}, "1 digits were read wrong"),
        ({"leaked": {"kv_pages_used": 3.0}}, "kv_pages_used"),
        ({"compiles_after_ready": 1.0}, "1 programs were compiled"),
        ({"slope_mib": 1.5}, "memory grows by 1.50 MiB a minute"),
        ({"exit_code": 1}, "exit code"),
        ({"problems": {"status 500 for chat": 2}}, "2 x status 500"),
    ],
)
def test_each_fault_alone_fails_the_soak(change, why):
    assert good().failures() == []
    assert any(why in failure for failure in replace(good(), **change).failures())


def test_a_short_soak_does_not_judge_memory():
    assert replace(good(), minutes=1.0, slope_mib=30.0).failures() == []


def test_the_slope_is_a_minute_s_growth_after_the_settling():
    samples = [(0.0, 0.0), (60.0, 500.0)] + [(120.0 + t, 600.0 + 2 * t / 60) for t in range(0, 400, 7)]
    assert abs(slope_per_minute(samples, 120.0) - 2.0) < 1e-9


def test_a_server_has_every_gauge_that_is_looked_at_for_leaks():
    assert [Metrics().registry.get_sample_value(f"vitstripe_{gauge}") for gauge in HELD] == [0.0] * len(HELD)


def test_gauges_that_are_not_zero_are_leaks():
    assert leaks({"num_requests_running": 0.0, "kv_pages_used": 2.0, "kv_pages": 99.0}) == {"kv_pages_used": 2.0}


def test_the_mix_has_everything_in_about_its_share():
    mix = Mix(3)
    jobs = [mix.job() for _ in range(2000)]
    share = {kind: sum(job.kind == kind for job in jobs) / len(jobs) for kind in {job.kind for job in jobs}}
    assert set(share) == {"completion", "chat", "digit", "pictures", "bad image"}
    assert abs(share["bad image"] - 0.05) < 0.02
    assert abs(sum(job.leave_after is not None for job in jobs) / len(jobs) - 0.1) < 0.03
    assert abs(sum(job.body["stream"] for job in jobs) / len(jobs) - 0.5) < 0.05
    assert {job.body.get("n", 1) for job in jobs} == {1, 2, 3, 4}
    again = Mix(3)
    assert [again.job().body for _ in range(50)] == [job.body for job in jobs[:50]], "a seed names the traffic"
