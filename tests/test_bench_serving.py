"""The serving benchmark: what it makes of replies, its passes on a tiny model, and, slowly, a whole run."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts.lib.bench_passes import Passes, timed
from scripts.lib.bench_serving import parse_arguments, problems, step_interval, summary
from scripts.lib.load_clients import Reply, chat, image_of, text_of
from scripts.lib.made_up_model import IMAGE_TOKEN, SHAPES, write_folder
from serving.models import bind_decoder, families
from serving.models.config import text_config
from vitbatch.checkpoint import bind_tower, image_processor
from vitstripe.checkpoint import Checkpoint

ROOT = Path(__file__).parent.parent


def reply(sent: float, ttft: float, step: float, tokens: int) -> Reply:
    times = [ttft + i * step for i in range(tokens)]
    usage = {"completion_tokens": tokens, "prompt_tokens": 10}
    return Reply(sent, 200, "", times, list(range(1, tokens + 1)), times[-1], usage)


def test_options_it_does_not_know_go_to_the_servers():
    options = parse_arguments(["--shape", "tiny", "--page-size", "32", "--no-prefix-cache"])
    assert options.shape == "tiny"
    assert options.server == ["--page-size", "32", "--no-prefix-cache"]


def test_a_summary_counts_what_was_lost_and_rates_the_rest():
    replies = [reply(0.0, 0.5, 0.1, 11), reply(0.1, 0.7, 0.1, 11), Reply(status=503, error="queue full")]
    found = summary(replies)
    assert (found["requests"], found["good"], found["errors"]) == (3, 2, ["503 queue full"])
    assert found["ttft_mean"] == pytest.approx(0.6)
    assert found["tpot_mean"] == pytest.approx(0.1)
    assert found["seconds"] == pytest.approx(1.8)
    assert found["output_tokens_a_second"] == pytest.approx(22 / 1.8)
    assert len(found["ttft_deciles"]) == 10
    assert "ttft_mean" not in summary(replies[2:])


def test_steps_are_counted_only_while_all_requests_are_answered():
    # While the first waits for the second, its tokens come twice as fast; later some come two at a time.
    times = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.1, 1.3, 1.7, 2.1, 2.3, 2.5]
    tokens = [1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 14, 15]
    early = Reply(0.0, 200, "", times, tokens, 2.5, {"completion_tokens": 15})
    late = reply(0.0, 0.5, 0.2, 11)
    assert step_interval([early, late]) == pytest.approx(0.2)
    assert math.isnan(step_interval([reply(0.0, 0.5, 0.2, 2)]))
    assert math.isnan(step_interval([Reply(status=503)]))


def test_lost_requests_and_compiles_after_ready_are_errors():
    options = parse_arguments(["--requests", "2"])
    good, bad = {"good": 2, "errors": []}, {"good": 1, "errors": ["500 "]}
    run = {"batching": "always", "first": good, "second": good, "text": good, "compiles_after_ready": 0.0}
    assert problems({"bursts": [run]}, options) == []
    wrong = problems({"bursts": [run | {"second": bad, "compiles_after_ready": 2.0}]}, options)
    assert len(wrong) == 2
    assert "second: ['500 ']" in wrong[0]
    assert "2 compiles after ready" in wrong[1]


def test_a_sweep_is_judged_by_what_ran_and_not_by_what_did_not_fit():
    options = parse_arguments(["--sweep"])
    ran = {"prompt": 100, "concurrency": 4, "good": 4, "errors": [], "compiles_after_ready": 0.0}
    too_large = {"prompt": 100, "concurrency": 16, "error": "out of memory"}
    assert problems({"sweep": [ran, too_large]}, options) == []
    assert problems({"sweep": [too_large]}, options) == ["no setting of the sweep ran"]
    wrong = problems({"sweep": [ran | {"good": 3, "errors": ["500 "], "compiles_after_ready": 1.0}]}, options)
    assert wrong == ["4 prompts of 100 tokens: ['500 ']", "4 prompts of 100 tokens: 1 compiles after ready"]


def test_no_two_prompts_or_images_are_the_same_and_all_have_the_size_asked_for():
    texts, images = {text_of(33, i) for i in range(5)}, {image_of(64, i) for i in range(5)}
    assert len(texts) == len(images) == 5
    assert {len(t.encode()) for t in texts} == {33}
    body = chat("abc", "data:x", 7)
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (7, True, True)
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_is_one_that_a_decoder_and_a_tower_can_be_built_of(tmp_path, shape):
    checkpoint = Checkpoint(write_folder(tmp_path / shape, shape))
    assert checkpoint.config["model_type"] in families()
    decoder = bind_decoder(checkpoint, tp=1, dtype=np.float32)
    assert decoder.graphdef is not None
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    assert len(tokenizer.encode("ab cd").ids) == 5
    assert tokenizer.decode([text_config(checkpoint.config)["vocab_size"] - 1]).strip()
    assert tokenizer.id_to_token(IMAGE_TOKEN) == "<|image_pad|>"
    if "vision_config" in checkpoint.config:
        assert bind_tower(checkpoint, dtype=np.float32).graphdef is not None
        assert image_processor(checkpoint).largest_image_patches >= 1024


def test_passes_of_a_tiny_model_are_timed_beside_their_floor(mesh_of):
    passes = Passes("tiny", mesh_of(1), running=2, prefill_rows=64, length=128)
    layer = 4 * 16 * 64 * 2 + 2 * 2 * 16 * 64 + 3 * 96 * 64
    assert passes.parameters == 2 * layer
    assert passes.key_bytes == 2 * 2 * 2 * 16 * jax.numpy.dtype(passes.lm.dtype).itemsize
    decode, prefill = timed(lambda: passes.decode(100, 1e9)), timed(lambda: passes.prefill(64, 128, 1e9))
    assert decode["work"] == passes.weight_bytes + 200 * passes.key_bytes
    assert prefill["work"] > 2 * 64 * passes.parameters
    for one in (decode, prefill):
        assert one["seconds"] > 0
        assert one["floor"] == pytest.approx(one["work"] / 1e9)


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model_loses_nothing(tmp_path):
    command = [sys.executable, "-m", "scripts.lib.bench_serving", "--shape", "tiny", "--servers", "1"]
    command += ["--requests", "3", "--size", "64", "--tokens-in", "96", "--tokens-out", "8", "--prefill-tokens", "64"]
    command += ["--json", str(tmp_path / "found.json"), "--mm-process-config", '{"image": {"max_image_tokens": 16}}']
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [run["batching"] for run in found["bursts"]] == ["always", "never"]
    assert all(run["first"]["prompt_tokens"] == 96 for run in found["bursts"])
    assert found["passes"]["decode"]["seconds"] > 0


@pytest.mark.slow
def test_the_engine_s_calls_are_timed_in_each_way(tmp_path):
    command = [sys.executable, "-m", "scripts.lib.bench_engine", "--shape", "tiny", "--running", "3", "--tokens", "24"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command += ["--json", str(tmp_path / "found.json")]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    ways = json.loads((tmp_path / "found.json").read_text())["ways"]
    assert len({way["way"] for way in ways}) == 4
    for way in ways:
        assert set(way["calls"]) == {"decode/3", "greedy/3"}
        assert 0 < sum(way["calls"].values()) < way["step"]
        assert (way["placing"] > 0) == way["way"].startswith("put first")
