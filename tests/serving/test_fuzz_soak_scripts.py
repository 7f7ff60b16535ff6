"""The long scripts in short, against the real server: made-up requests, and mixed traffic with a SIGTERM at the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, report: Path, *flags: str) -> dict:
    """The script's own report; it must have found nothing wrong."""
    command = [sys.executable, "-m", f"scripts.lib.{module}", "--json", str(report), *flags]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"CI": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(report.read_text())


@pytest.mark.slow
def test_requests_made_from_the_document_are_never_a_fault_of_the_server(tmp_path):
    found = run("fuzz_server", tmp_path / "report.json", "--cases", "400")
    assert sum(found["cases"].values()) >= 400
    assert min(found["cases"].values()) >= 1
    assert {"POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"} <= set(found["cases"])
    assert found["statuses"]["200 positive"] > 20
    assert found["statuses"]["400 negative"] > 50


@pytest.mark.slow
def test_a_short_soak_loses_nothing(tmp_path):
    report = run("soak", tmp_path / "report.json", "--minutes", "0.4")
    assert report["failures"] == []
    assert report["ends"]["answered"] > 50
    assert report["digits_right"] > 10
    for end in ("client left", "refused: bad image"):
        assert report["ends"][end] > 0
    assert report["busy"] > 0, "a burst filled the queue"
    assert sum(report["ends"].values()) == report["requests"]
