"""A config.json with values of the wrong kind is one error that says so, whichever half reads it; flags that do not go
with the model are another."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from serving.models import bind_decoder
from tests.helpers import GOLDENS
from vitbatch import CompileGuard, EncoderConfig
from vitbatch.checkpoint import bind_tower
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, CheckpointError, load


def broken(tmp_path: Path, golden: str, path: str, value: Any) -> Checkpoint:
    """A copy of a checkpoint whose config.json has `value` at a dotted path."""
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    *outer, name = path.split(".")
    inner = config
    for key in outer:
        inner = inner[key]
    inner[name] = value
    for file in (GOLDENS / golden).iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file.resolve())
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("golden", "path", "value"),
    [
        ("qwen3_5", "text_config.rope_parameters.mrope_section", None),
        ("qwen3_vl", "text_config.rope_parameters.mrope_section", 3),
        ("qwen3_5", "text_config.layer_types", 7),
        ("glm5_next", "text_config.mlp_layer_types", 7),
        ("glm_moe_dsa", "rope_parameters", "plain"),
        ("glm_moe_dsa", "mlp_layer_types", 7),
        ("deepseek_v32", "quantization_config", {"quant_method": "fp8", "weight_block_size": 128}),
    ],
)
def test_a_decoder_of_wrong_values_is_refused(tmp_path, golden, path, value):
    checkpoint = broken(tmp_path, golden, path, value)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        bind_decoder(checkpoint, tp=1, dtype="float32")


@pytest.mark.parametrize(
    ("golden", "path", "value"),
    [
        ("qwen3_vl", "vision_config", None),
        ("qwen3_vl", "vision_config.deepstack_visual_indexes", None),
        ("glm4v", "vision_config", "none"),
    ],
)
def test_a_tower_of_wrong_values_is_refused(tmp_path, golden, path, value):
    checkpoint = broken(tmp_path, golden, path, value)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        bind_tower(checkpoint)


@pytest.mark.parametrize(
    ("golden", "flags", "text"),
    [
        ("qwen3_5", {"prefill_tokens": 32}, "prefill_tokens is 32; this model needs at least 64"),
        ("glm5_next", {"page_size": 6}, "page_size is 6; this model keeps a cache slot for every 4 tokens"),
    ],
)
def test_flags_that_a_model_cannot_take_are_told_before_anything_is_loaded(golden, flags, text):
    begun = []

    @contextmanager
    def stage(name: str):
        begun.append(name)
        yield lambda done, total, what: None

    with pytest.raises(ValueError, match=text):
        load_engine(
            Checkpoint(GOLDENS / golden),
            make_mesh(1),
            EngineConfig(max_model_len=96, max_seqs=2, **flags),
            EncoderConfig(),
            model_name=golden,
            eos_ids=frozenset(),
            metrics=Metrics(),
            guard=CompileGuard(),
            stage=stage,
        )
    assert not begun


def test_taps_stored_with_their_axes_of_length_one_elsewhere_load_the_same(tmp_path):
    """As some exports write a depthwise convolution: [F, L, 1] for [F, 1, L]."""
    golden = GOLDENS / "qwen3_5_moe_text"
    tensors = load_file(golden / "model.safetensors")
    moved = {n: np.ascontiguousarray(t.transpose(0, 2, 1)) if "conv1d" in n else t for n, t in tensors.items()}
    assert any(moved[name].shape != tensors[name].shape for name in moved)
    save_file(moved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((golden / "config.json").read_text())
    states = []
    for folder in (golden, tmp_path):
        checkpoint = Checkpoint(folder)
        binding = bind_decoder(checkpoint, tp=1, dtype=jnp.float32)
        assert not binding.problems
        states.append(jax.tree.leaves(load(checkpoint, binding, make_mesh(1))))
    for got, want in zip(*states, strict=True):
        np.testing.assert_array_equal(got, want)
