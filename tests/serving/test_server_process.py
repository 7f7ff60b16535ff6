"""python -m serving as its users meet it: start-up, answers, errors, metrics, shutdown."""

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from serving.cli import DIGITS_FOLDER
from tests.serving.demo_server import DIGITS, PHOTOS

ADMIN = "sk-admin-of-the-test"
FLAGS = ["--tp", "2", "--max-model-len", "256", "--max-seqs", "4", "--prefill-tokens", "128", "--page-size", "16"]
# Warnings end these servers, so they share no cache of programs: JAX 0.10 warns of one that is still being written.
ENVIRON = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def command(*flags):
    return [sys.executable, "-W", "error", "-m", "serving", *flags]


def run(*flags):
    return subprocess.run(command(*flags), env=ENVIRON, capture_output=True, text=True, timeout=240, check=False)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def data_uri(raw: bytes, mime="image/png"):
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{base64.b64encode(raw).decode()}"}}


def chat(*images, text="digit?", **fields):
    parts = [*images, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0} | fields


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(process, client) of a ready server; what it answered while it loaded is checked on the way."""
    port = free_port()
    folder = tmp_path_factory.mktemp("server")
    log, config = folder / "log", folder / "server.toml"
    config.write_text(f'model = "absent"\nport = {port}\nprofile-dir = "{folder / "traces"}"\n')
    environ = ENVIRON | {"VITSTRIPE_ADMIN_KEY": ADMIN}
    with log.open("w") as out:
        process = subprocess.Popen(
            command("--config", str(config), "--model", "digits", *FLAGS), stderr=out, env=environ
        )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        try:
            early = answers_until_ready(process, client, log)
            assert early, "HTTP must answer while the model loads"
            assert all(r.status_code == 503 and r.json()["error"]["type"] for r, _ in early)
            assert all(health == 200 for _, health in early), "alive is not the same as ready"
            yield process, client
        finally:
            process.kill()
            process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line.get("message", "").startswith("ready after") for line in lines)
    asked = [line for line in lines if line.get("route") == "/v1/chat/completions"]
    assert asked
    assert all(line["request_id"] and "status" in line for line in asked)
    assert not any(secret in log.read_text() for secret in (ADMIN, "digit?", "base64"))


def answers_until_ready(process, client, log):
    """(answer of /ready, status of /health) of every look until the server is ready."""
    early, deadline = [], time.monotonic() + 400
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "the server did not become ready"
        try:
            ready = client.get("/ready")
            if ready.status_code == 200:
                return early
            early.append((ready, client.get("/health").status_code))
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.3)


@pytest.fixture(scope="module")
def client(server):
    return server[1]


def test_concurrent_digits_are_answered_right_with_image_tokens_counted(client):
    bodies = [chat(data_uri(path.read_bytes())) for path in DIGITS]
    with ThreadPoolExecutor(20) as pool:
        answers = [r.json() for r in pool.map(lambda b: client.post("/v1/chat/completions", json=b), bodies)]
    assert [a["choices"][0]["message"]["content"] for a in answers] == [p.name.split("_")[1] for p in DIGITS]
    for answer, path in zip(answers, DIGITS, strict=True):
        width, height = map(int, re.findall(r"(\d+)x(\d+)", path.name)[0])
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == width * height // 32**2
        assert answer["model"] == "digits_vlm"
    assert len({a["vitstripe"]["vit_calls"][0] for a in answers}) < len(answers)


def test_a_stream_says_what_the_whole_answer_says(client):
    body = chat(data_uri(PHOTOS[1].read_bytes(), "image/png"), max_tokens=8)
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    with client.stream(
        "POST", "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == whole
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (chat(data_uri(DIGITS[0].read_bytes()[:-60])), "image"),
        (chat(data_uri(b"no picture at all")), "image"),
        (chat({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}), "data"),
        (chat(*[data_uri(DIGITS[0].read_bytes())] * 9), "8"),
        (chat(text="word " * 300), "256"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(temperature="hot"), "temperature"),
        ({"messages": []}, "messages"),
        (chat(n=9), "n"),
    ],
    ids=["truncated", "no image", "remote", "too many", "too long", "max_tokens", "type", "no messages", "n"],
)
def test_bad_input_is_a_400_that_says_what_to_change(client, body, says):
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"] or says == error["param"]
    good = client.post("/v1/chat/completions", json=chat(data_uri(DIGITS[4].read_bytes())))
    assert good.json()["choices"][0]["message"]["content"] == DIGITS[4].name.split("_")[1]


def test_other_routes_and_shapes_of_error(client):
    assert client.get("/nowhere").json()["error"]["code"] == "not_found"
    assert client.get("/v1/models").json()["data"][0]["id"] == "digits_vlm"
    assert client.get("/v1/models/other").status_code == 404
    done = client.post("/v1/completions", json={"prompt": "digit", "max_tokens": 3, "temperature": 0})
    assert done.json()["usage"]["completion_tokens"] <= 3


def test_a_trace_is_made_of_the_running_server_and_only_for_its_admin(client):
    admin = {"Authorization": f"Bearer {ADMIN}"}
    assert client.post("/start_profile").status_code == 401
    assert client.post("/start_profile", headers=admin).status_code == 200
    assert client.post("/v1/chat/completions", json=chat(data_uri(DIGITS[1].read_bytes()))).status_code == 200
    trace = client.post("/stop_profile", headers=admin).json()
    assert any(file["path"].endswith(".xplane.pb") for file in trace["files"])
    after = client.post("/v1/chat/completions", json=chat(data_uri(DIGITS[3].read_bytes()))).json()
    assert after["choices"][0]["message"]["content"] == DIGITS[3].name.split("_")[1]
    assert client.get("/health_generate").json()["status"] == "alive"


def test_metrics_count_images_and_no_compile_after_ready(client):
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert values['vitstripe_compiles_total{stage="after_ready"}'] == 0
    assert values['vitstripe_compiles_total{stage="before_ready"}'] > 0
    assert values["vitstripe_vit_images_per_call_sum"] >= values["vitstripe_vit_calls_total"] > 0
    assert values["vitstripe_vit_lanes_filled_sum"] > values["vitstripe_vit_calls_total"]
    assert values["vitstripe_time_to_first_token_seconds_count"] > 20
    for gauge in ("num_requests_running", "num_requests_waiting"):
        assert values[f"vitstripe_{gauge}"] == 0
        assert values[f'vllm:{gauge}{{engine="0",model_name="digits_vlm"}}'] == 0
    phases = [values[f"vitstripe_request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode")]
    assert all(seconds >= 0 for seconds in phases)
    assert values["vitstripe_request_inference_time_seconds_sum"] == pytest.approx(sum(phases[1:]))


def test_sigterm_lets_running_answers_end_refuses_new_ones_and_exits_in_order(server):
    """Four streams, as many as run at once."""
    process, client = server
    bodies = [chat(data_uri(path.read_bytes()), max_tokens=200, stream=True, ignore_eos=True) for path in DIGITS[:4]]
    with ExitStack() as open_streams:
        streams = [
            open_streams.enter_context(client.stream("POST", "/v1/chat/completions", json=body)) for body in bodies
        ]
        lines = [stream.iter_lines() for stream in streams]
        for one in lines:
            next(one)
        process.send_signal(signal.SIGTERM)
        while (ready := client.get("/ready")).status_code == 200:
            time.sleep(0.01)
        assert ready.status_code == 503
        assert client.post("/v1/chat/completions", json=chat()).status_code == 503
        rests = [[line for line in one if line] for one in lines]
    for rest in rests:
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert process.wait(40) == 0


def test_sigterm_while_loading_ends_without_a_crash(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command("--model", "digits", "--port", str(free_port()), *FLAGS), stderr=log, env=ENVIRON
        )
    while "language weights" not in (tmp_path / "log").read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_users_mistake_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    odd = {}
    for name, file, text in (
        ("no text config", "config.json", '{"model_type": "qwen3_vl", "text_config": null}'),
        ("rope theta", "config.json", (DIGITS_FOLDER / "config.json").read_text().replace("10000.0", '"high"')),
        ("tokenizer", "tokenizer.json", "[]"),
    ):
        odd[name] = tmp_path / name
        shutil.copytree(DIGITS_FOLDER, odd[name])
        (odd[name] / file).write_text(text)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            (("--model", str(tmp_path / "absent")), "is not a folder"),
            (("--model", str(tmp_path)), "no weights"),
            (("--model", "digits", "--mm-process-config", "{"), "--mm-process-config is not JSON"),
            (("--model", "digits", "--max-model-len", "9999999"), "max_position_embeddings 4096"),
            (("--model", "digits", "--port", str(taken.getsockname()[1])), "choose another --port"),
            (("--model", str(odd["no text config"])), "'text_config'"),
            (("--model", str(odd["rope theta"])), "rope_theta is 'high'"),
            (("--model", str(odd["tokenizer"])), "is not a usable tokenizer"),
        ]
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda case: run(*case[0]), cases))
    for (flags, says), done in zip(cases, results, strict=True):
        assert done.returncode == 2, flags
        assert says in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_help_names_every_switch_with_its_default():
    text = run("--help").stdout
    for flag in ("--model", "--tp", "--dp-encoder", "--no-indexer-stripes", "--limit-mm-data-per-request"):
        assert flag in text
    assert "default: 512" in text


def test_doctor_says_what_the_machine_has():
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    assert re.search(r"jax +\d", done.stdout)
    assert "cpu" in done.stdout


def test_the_demo_model_is_in_the_package():
    assert (DIGITS_FOLDER / "model.safetensors").is_file()
