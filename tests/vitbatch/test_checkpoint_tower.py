"""Binding a tower and its processor to checkpoint folders."""

import json
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.vitbatch.pictures import noise
from vitbatch import BucketLadder, EncoderConfig, VisionEncoder
from vitbatch.checkpoint import bind_tower, image_processor, vision_config
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, CheckpointError, load, save_orbax

CONFIG = EncoderConfig(ladder=BucketLadder((512,)))


@pytest.fixture
def copy(checkpoint, tmp_path):
    for name in ("config.json", "model.safetensors", "preprocessor_config.json"):
        shutil.copy(checkpoint / name, tmp_path / name)
    return tmp_path


def tensors_of(folder) -> dict[str, np.ndarray]:
    """The loaded tower's parameters by name."""
    opened = Checkpoint(folder)
    state = load(opened, bind_tower(opened), make_mesh(2))
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(state)}


def assert_same_tower(folder, other) -> None:
    got, want = tensors_of(folder), tensors_of(other)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_the_binding_takes_every_vision_tensor_and_nothing_else(checkpoint):
    opened = Checkpoint(checkpoint)
    binding = bind_tower(opened)
    assert (binding.name, binding.problems) == ("vision", [])
    taken = {source.tensor for found in binding.sources.values() for source in found}
    assert taken == {name for name in opened.tensors if "visual." in name}


def test_the_older_prefix_is_accepted(copy, checkpoint):
    tensors = {n.replace("model.visual.", "visual."): t for n, t in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    assert_same_tower(copy, checkpoint)


def test_every_tensor_that_does_not_fit_is_listed_at_once(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.visual.blocks.1.attn.qkv.weight"]
    tensors["model.visual.pos_embed.weight"] = np.zeros((49, 48), np.float32)
    tensors["model.visual.blocks.9.norm1.bias"] = np.zeros(48, np.float32)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        VisionEncoder.from_checkpoint(copy, mesh=make_mesh(2), config=CONFIG)
    text = str(caught.value)
    assert "missing   model.visual.blocks.1.attn.qkv.weight [144, 48]" in text
    assert "mis-shaped model.visual.pos_embed.weight: the file has [49, 48], the config wants [64, 48]" in text
    assert "unknown   model.visual.blocks.9.norm1.bias [48]" in text


def test_an_orbax_folder_gives_the_same_tower(checkpoint, tmp_path):
    opened = Checkpoint(checkpoint)
    binding = bind_tower(opened)
    save_orbax(tmp_path / "orbax", opened, {"vision": load(opened, binding, make_mesh(1))})
    assert_same_tower(tmp_path / "orbax", checkpoint)


def test_a_loaded_state_makes_the_same_encoder_as_the_folder(checkpoint, encoder_of):
    opened, mesh = Checkpoint(checkpoint), make_mesh(2)
    binding = bind_tower(opened)
    state = load(opened, binding, mesh)
    processor = image_processor(opened, CONFIG)
    encoder = VisionEncoder(binding.graphdef, state, vision_config(opened), processor, mesh, "tp", CONFIG)
    (got,), (want,) = (e.encode([noise(100, 70, 0)]) for e in (encoder, encoder_of(2, CONFIG.ladder.capacities)))
    np.testing.assert_array_equal(got, want)


def test_the_processor_knows_the_limits_of_the_encoder(checkpoint):
    config = EncoderConfig(ladder=BucketLadder((64, 128)), max_pixels=5000, min_pixels=2048, max_image_pixels=9000)
    processor = image_processor(Checkpoint(checkpoint), config)
    assert (processor.min_pixels, processor.max_pixels) == (2048, 9000)
    assert (processor.max_decoded_pixels, processor.max_patches) == (5000, 128)


def test_a_nested_processor_config_is_read(copy):
    settings = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").unlink()
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert image_processor(Checkpoint(copy)).max_pixels == 65536


def test_a_folder_without_a_processor_or_a_tower_says_so(copy):
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no preprocessor_config\.json"):
        image_processor(Checkpoint(copy))
    (copy / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        image_processor(Checkpoint(copy))
    (copy / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="model_type 'llama' has no vision tower here"):
        bind_tower(Checkpoint(copy))
