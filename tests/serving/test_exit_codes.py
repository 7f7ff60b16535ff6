"""How `python -m serving` ends tells why: each in a process of its own, with a small text model."""

import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import httpx
import pytest

from serving.exits import Exit
from tests.helpers import GOLDENS

MODEL = str(GOLDENS / "glm_moe_dsa")
FLAGS = ["--model", MODEL, "--max-model-len", "1024", "--max-seqs", "2", "--prefill-tokens", "64"]
LOSES_ITS_DEVICE = textwrap.dedent(
    """
    import sys, jax
    from serving.__main__ import main
    from serving.runner import Runner

    def lost(self, seqs):
        raise jax.errors.JaxRuntimeError("device lost")

    warm_up = Runner.warm_up

    def warmed(self, *args):
        times = warm_up(self, *args)
        Runner.decode = lost
        return times

    Runner.warm_up = warmed
    sys.exit(main(sys.argv[1:]))
    """
)
DECODES_SLOWLY = textwrap.dedent(  # so that an answer is still under way when a signal comes, however late
    """
    import sys, time
    from serving.__main__ import main
    from serving.runner import Runner

    decode = Runner.decode

    def slowly(self, seqs):
        time.sleep(0.1)
        return decode(self, seqs)

    Runner.decode = slowly
    sys.exit(main(sys.argv[1:]))
    """
)
HANGS_AT_ITS_FIRST_RUN = textwrap.dedent(
    """
    import sys, threading
    from serving import config
    from serving.__main__ import main
    from serving.runner import Runner
    from vitbatch import VisionEncoder

    def hangs(self, *args):
        threading.Event().wait()

    config.DEFAULT_SECONDS = 1.0
    Runner._splice = VisionEncoder._run = hangs
    sys.exit(main([*sys.argv[1:], "--step-seconds", "1"]))
    """
)


@pytest.fixture
def start(tmp_path):
    """start(code, *flags): a process and a client of it, once it is ready."""
    begun = []

    def run(code, *flags):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        program = ["-m", "serving"] if code is None else ["-c", code]
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen([sys.executable, *program, *FLAGS, "--port", str(port), *flags], stderr=log)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        begun.append((process, client, log))
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, f"the server did not become ready: {(tmp_path / 'log').read_text()}"
            try:
                if client.get("/ready").status_code == 200:
                    return process, client, tmp_path / "log"
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    yield run
    for process, client, log in begun:
        client.close()
        log.close()
        if process.poll() is None:
            process.kill()
            process.wait()


BODY = {"messages": [{"role": "user", "content": "count"}], "temperature": 0, "ignore_eos": True}


def test_a_drain_that_takes_too_long_says_so_and_tells_the_client(start):
    process, client, log = start(DECODES_SLOWLY, "--drain-seconds", "0.1")
    body = BODY | {"max_tokens": 900, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = list(lines)[-1]
    assert json.loads(last)["error"]["type"] == "internal_error"
    assert process.wait(30) == Exit.DRAIN_TIMED_OUT
    assert "1 request(s) were still running after 0.1 s" in log.read_text()


def test_a_second_signal_ends_the_server_at_once(start):
    process, client, log = start(DECODES_SLOWLY, "--drain-seconds", "300")
    body = BODY | {"max_tokens": 900, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        next(stream.iter_lines())
        process.send_signal(signal.SIGTERM)
        while client.get("/ready").status_code == 200:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == Exit.DRAIN_TIMED_OUT
    assert "a second signal ended the server before its requests were done" in log.read_text()


def test_a_lost_device_says_so_and_tells_the_client(start):
    process, client, log = start(LOSES_ITS_DEVICE)
    answer = client.post("/v1/chat/completions", json=BODY | {"max_tokens": 5})
    assert answer.status_code >= 500
    assert "device lost" not in answer.text
    assert process.wait(30) == Exit.DEVICE_LOST
    assert "JaxRuntimeError in the step loop" in log.read_text()


@pytest.mark.parametrize(("model", "program"), [(MODEL, "splice/64"), ("digits", r"vision/\S+")])
def test_a_program_that_does_not_come_back_at_the_start_ends_the_server_with_its_name(model, program):
    flags = [*FLAGS, "--model", model, "--port", "0"]
    command = [sys.executable, "-c", HANGS_AT_ITS_FIRST_RUN, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == Exit.DEVICE_LOST, done.stderr
    assert re.search(f"the first run of {program} did not end within 1 s", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
