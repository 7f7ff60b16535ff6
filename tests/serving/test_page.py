"""The page for browsers: only where it was asked for, loading nothing, opening nothing; and in a real browser."""

import base64
import hashlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette

from serving.api.keys import Keys
from serving.api.page import PAGE_FILE
from serving.metrics import Metrics
from tests.serving.api.harness import FakeEngine, app_of, call
from tests.serving.browser import CHROMIUM, browser

KEY = "sk-page"
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="NOT RUN: needs Chromium (Debian: apt-get install chromium)")


def test_a_server_has_no_page_unless_it_is_told():
    assert call(app_of(FakeEngine()), "GET", "/").status_code == 404


def test_the_page_is_html_that_may_speak_to_its_server_alone():
    response = call(app_of(FakeEngine(), page=True), "GET", "/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert (policy["connect-src"], policy["img-src"]) == ("'self'", "data:")
    assert "unsafe" not in response.headers["content-security-policy"]
    for tag in ("script", "style"):
        [body] = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_loads_nothing_and_puts_no_text_of_the_model_into_markup():
    html = PAGE_FILE.read_text(encoding="utf-8")
    assert re.findall(r"https?:|(?:src|href)=\"(?!data:)", html) == []
    assert re.findall(r"innerHTML|outerHTML|AdjacentHTML|document\.write|eval\(|\son\w+=\"|\sstyle=\"", html) == []


def test_the_page_opens_itself_and_nothing_else():
    engine = FakeEngine()
    app = app_of(engine, page=True, keys=Keys(frozenset({KEY})))
    assert call(app, "GET", "/").status_code == 200
    assert call(app, "POST", "/").status_code == 405
    for path in ("/v1/models", "/openapi.json", "/page.html", "/index.html"):
        assert call(app, "GET", path).status_code == 401, path
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert call(app, "POST", "/v1/chat/completions", json=body).status_code == 401
    assert engine.submissions == []


@contextmanager
def listening(app: Starlette) -> Iterator[str]:
    """The app on a port of its own, in a thread; its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def counted() -> Metrics:
    metrics = Metrics()
    metrics.vit_call(images=3, lanes_filled=2, padded_ratio=0.1)
    metrics.vit_call(images=1, lanes_filled=1, padded_ratio=0.1)
    return metrics


@needs_chromium
@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 800, False), (360, 740, True)], ids=["desktop", "phone"])
def test_a_picture_is_asked_about_and_the_tokens_and_counts_are_shown(tmp_path, width, height, phone):
    engine = FakeEngine(answer="<b>two</b> & a star")
    with listening(app_of(engine, page=True, metrics=counted())) as url, browser(tmp_path / "profile") as tab:
        tab.open(f"{url}/", width, height, phone=phone)
        tab.until("document.getElementById('state').textContent.startsWith('ready')")
        assert tab.text("model") == engine.model_name
        tab.click("draw")
        tab.until("document.querySelectorAll('#drop img').length == 1")
        tab.type("question", "How many objects are there?")
        tab.click("go")
        tab.until("document.querySelector('#talk li .n')?.textContent.endsWith('in all')")
        # As text: markup that a model writes stays what it wrote.
        assert tab.run("document.querySelector('#talk .a').textContent") == engine.answer
        assert tab.run("document.querySelectorAll('#talk .a b').length") == 0
        assert re.fullmatch(r"\d+ ms", tab.text("ttft"))
        assert int(tab.text("images")) > 0
        assert (tab.until("document.getElementById('lanes').textContent.trim() != '–'"), tab.text("lanes")) == (
            True,
            "1.50",
        )
        assert (tab.text("calls"), tab.text("encoded"), tab.text("compiles")) == ("2", "4", "0")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
        tab.picture(tmp_path / "page.png")
        assert tab.faults == []
        assert [address for address in tab.asked if not address.startswith((url, "data:"))] == []
    [submission] = engine.submissions
    assert len(submission.images) == 1


@needs_chromium
def test_the_page_asks_for_a_key_where_the_server_wants_one(tmp_path):
    engine = FakeEngine(answer="open")
    app = app_of(engine, page=True, keys=Keys(frozenset({KEY})))
    with listening(app) as url, browser(tmp_path / "profile") as tab:
        tab.open(f"{url}/", 1280, 800)
        tab.until("!document.getElementById('locked').hidden")
        tab.type("question", "hi")
        tab.click("go")
        tab.until("document.querySelector('#talk .bad')?.textContent.includes('API key')")
        assert engine.submissions == []
        tab.type("key", KEY)
        tab.until("document.getElementById('state').textContent.startsWith('ready')")
        tab.click("go")
        assert tab.until("document.querySelector('#talk .a').textContent") == "open"
        assert KEY not in tab.run("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
