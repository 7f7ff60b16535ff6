"""Loading: every tensor once, in the right place, or one error that lists all that is wrong."""

import json
import re
import shutil
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.vitstripe.toy import EXPERTS, PREFIX, Toy, bind_toy, expected_state, toy_tensors, values, write_folder
from vitstripe.checkpoint import Checkpoint, CheckpointError, bind, load, raise_problems, save_orbax
from vitstripe.nn import LayerNorm, Linear

TENSORS = toy_tensors()


class CountingCheckpoint(Checkpoint):
    """Counts how often each tensor is read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.reads = Counter()

    def read(self, name: str) -> np.ndarray:
        self.reads[name] += 1
        return super().read(name)


def assert_equal_states(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.multidevice
@pytest.mark.parametrize("files", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_tensor_is_read_once_and_lands_where_it_belongs(tmp_path, mesh_of, tp, files):
    checkpoint = CountingCheckpoint(write_folder(tmp_path, TENSORS, files))
    state = load(checkpoint, bind_toy(checkpoint), mesh_of(tp))
    assert_equal_states(values(state), expected_state(TENSORS))
    assert checkpoint.reads == dict.fromkeys(TENSORS, 1)


@pytest.mark.multidevice
def test_parameters_are_cut_along_their_own_dimension(tmp_path, mesh_of):
    checkpoint = Checkpoint(write_folder(tmp_path, TENSORS))
    state = load(checkpoint, bind_toy(checkpoint), mesh_of(4))
    shards = {
        ".".join(map(str, path)): {s.data.shape for s in v.get_value().addressable_shards}
        for path, v in nnx.to_flat_state(state)
    }
    assert shards == {
        "patch_embed.weight": {(12, 24)},
        "mlp.up_proj.weight": {(5, 12)},
        "mlp.up_proj.bias": {(5,)},
        "mlp.down_proj.weight": {(12, 5)},
        "mlp.experts.gate_proj.weight": {(EXPERTS, 2, 12)},
        "norm.weight": {(12,)},
        "norm.bias": {(12,)},
    }


def test_a_parameter_keeps_its_own_dtype_whatever_the_file_has(tmp_path, mesh_of):
    wide = {name: tensor.astype(np.float32) * 1.001 for name, tensor in TENSORS.items()}
    checkpoint = Checkpoint(write_folder(tmp_path, wide))
    found = values(load(checkpoint, bind_toy(checkpoint, jnp.bfloat16), mesh_of(1)))
    assert found["norm.weight"].dtype == np.float32
    assert found["mlp.up_proj.weight"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        found["mlp.experts.gate_proj.weight"], expected_state(wide)["mlp.experts.gate_proj.weight"].astype(jnp.bfloat16)
    )


def test_progress_counts_the_bytes_up_to_all_of_them(tmp_path, mesh_of):
    checkpoint = Checkpoint(write_folder(tmp_path, TENSORS))
    seen = []
    load(checkpoint, bind_toy(checkpoint), mesh_of(1), progress=lambda done, total: seen.append((done, total)))
    total = sum(4 * t.size for t in TENSORS.values())
    assert [t for _, t in seen] == [total] * len(seen)
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert done[-1] == total


@pytest.mark.parametrize("family", ["glm_moe_dsa", "qwen3_vl"])
def test_a_sharded_checkpoint_reads_like_the_single_file(goldens, family):
    single, sharded = Checkpoint(goldens / family), Checkpoint(goldens / f"{family}__sharded")
    assert len({file for file in sharded.tensors.values()}) > 1
    assert single.tensors.keys() == sharded.tensors.keys()
    for name in single.tensors:
        assert single.shape(name) == sharded.shape(name)
        np.testing.assert_array_equal(single.read(name), sharded.read(name), err_msg=name)


def test_one_error_lists_everything_that_does_not_fit(tmp_path):
    tensors = dict(TENSORS)
    del tensors[PREFIX + "norm.bias"]
    del tensors[PREFIX + "mlp.experts.1.gate_proj.weight"]
    tensors[PREFIX + "mlp.up_proj.weight"] = tensors[PREFIX + "mlp.up_proj.weight"].T.copy()
    tensors[PREFIX + "mlp.extra.weight"] = np.ones((2, 3), np.float32)
    checkpoint = Checkpoint(write_folder(tmp_path, tensors))
    with pytest.raises(CheckpointError) as caught:
        raise_problems(checkpoint, [bind_toy(checkpoint)])
    head, *lines = str(caught.value).splitlines()
    assert head == f"{tmp_path} does not fit its config.json (4 tensor(s)):"
    assert sorted(line.split(maxsplit=1)[0] + " " + line.split(maxsplit=1)[1] for line in lines) == [
        f"mis-shaped {PREFIX}mlp.up_proj.weight: the file has [12, 20], the config wants [20, 12]",
        f"missing {PREFIX}mlp.experts.1.gate_proj.weight [8, 12]",
        f"missing {PREFIX}norm.bias [12]",
        f"unknown {PREFIX}mlp.extra.weight [2, 3]",
    ]


def test_problems_of_several_modules_come_in_one_error(tmp_path):
    tensors = {n: t for n, t in TENSORS.items() if not n.endswith("norm.weight")}
    checkpoint = Checkpoint(write_folder(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=r"\(2 tensor\(s\)\)"):
        raise_problems(checkpoint, [bind_toy(checkpoint), bind_toy(checkpoint)])


def test_tensors_of_others_and_known_unused_ones_are_no_problem(tmp_path):
    tensors = {**TENSORS, "lm_head.weight": np.ones((3, 2), np.float32), PREFIX + "mtp.norm": np.ones(4, np.float32)}
    checkpoint = Checkpoint(write_folder(tmp_path, tensors))
    binding = bind_toy(checkpoint, owns=lambda t: t.startswith(PREFIX), ignore=lambda t: ".mtp." in t)
    raise_problems(checkpoint, [binding])
    assert len(bind_toy(checkpoint).problems) == 2


def test_a_folder_that_fits_has_no_problems(tmp_path):
    checkpoint = Checkpoint(write_folder(tmp_path, TENSORS))
    assert raise_problems(checkpoint, [bind_toy(checkpoint)]) is None


def break_no_folder(folder):
    shutil.rmtree(folder)


def break_no_config(folder):
    (folder / "config.json").unlink()


def break_config_syntax(folder):
    (folder / "config.json").write_text('{"model_type": ')


def break_config_type(folder):
    (folder / "config.json").write_text("[1, 2]")


def break_config_encoding(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe{}")


def break_no_weights(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def break_no_weight_map(folder):
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def break_absent_part(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def edit_index(folder, name, file):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][name] = file
    index.write_text(json.dumps(content))


def break_escape_upwards(folder):
    edit_index(folder, PREFIX + "norm.bias", "../elsewhere.safetensors")


def break_escape_absolute(folder):
    edit_index(folder, PREFIX + "norm.bias", "/etc/passwd")


def break_tensor_not_held(folder):
    edit_index(folder, PREFIX + "no.such", "model-00001-of-00002.safetensors")


def break_truncated(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def break_empty_file(folder):
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def break_header_length(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (break_no_folder, "is not a folder; give the folder that holds config.json"),
        (break_no_config, "holds no config.json"),
        (break_config_syntax, "config.json is not readable JSON"),
        (break_config_type, "config.json holds a list, not an object"),
        (break_config_encoding, "config.json is not readable JSON"),
        (break_no_weights, "no weights"),
        (break_no_weight_map, "has no weight_map"),
        (break_absent_part, "names: model-00002-of-00002.safetensors"),
        (break_escape_upwards, "names files outside the folder: ../elsewhere.safetensors"),
        (break_escape_absolute, "names files outside the folder: /etc/passwd"),
        (break_tensor_not_held, f"names tensors that their files do not hold: {PREFIX}no.such"),
        (break_truncated, "model-00001-of-00002.safetensors is not a readable safetensors file"),
        (break_empty_file, "model-00001-of-00002.safetensors is not a readable safetensors file"),
        (break_header_length, "model-00001-of-00002.safetensors is not a readable safetensors file"),
    ],
    ids=lambda value: value.__name__.removeprefix("break_") if callable(value) else "",
)
def test_a_broken_folder_is_a_one_line_error_that_names_it(tmp_path, damage, says):
    folder = write_folder(tmp_path / "model", TENSORS, files=2)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert says in message
    assert "\n" not in message


@pytest.fixture
def orbax_folder(tmp_path, mesh_of):
    """The toy checkpoint, loaded on two devices and written as an Orbax folder."""
    source = write_folder(tmp_path / "hf", TENSORS, files=2)
    (source / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint(source)
    state = load(checkpoint, bind_toy(checkpoint), mesh_of(2))
    save_orbax(tmp_path / "orbax_model", checkpoint, {"toy": state})
    return tmp_path / "orbax_model"


@pytest.mark.multidevice
def test_an_orbax_folder_restores_on_another_number_of_devices(orbax_folder, mesh_of):
    checkpoint = Checkpoint(orbax_folder)
    assert checkpoint.is_orbax
    for tp in (1, 4):
        state = load(checkpoint, bind_toy(checkpoint), mesh_of(tp))
        assert_equal_states(values(state), expected_state(TENSORS))
        up = state["mlp"]["up_proj"]["weight"].get_value()
        assert up.sharding.mesh.shape == {"tp": tp}
        assert up.sharding.spec == P("tp")
        assert up.addressable_shards[0].data.shape == (20 // tp, 12)
    assert len(jax.devices()) == 8


def test_an_orbax_folder_keeps_the_small_files_and_no_safetensors(orbax_folder):
    assert sorted(file.name for file in orbax_folder.iterdir()) == ["config.json", "orbax", "tokenizer.json"]
    assert json.loads((orbax_folder / "config.json").read_text()) == {"model_type": "toy"}


def test_an_orbax_folder_is_never_written_over(orbax_folder, tmp_path):
    before = sorted(orbax_folder.rglob("*"))
    with pytest.raises(CheckpointError, match="exists and is not empty; choose a new folder"):
        save_orbax(orbax_folder, Checkpoint(tmp_path / "hf"), {})
    assert sorted(orbax_folder.rglob("*")) == before


def test_an_orbax_folder_without_the_wanted_module_says_so(orbax_folder):
    (orbax_folder / "orbax" / "toy").rename(orbax_folder / "orbax" / "other")
    checkpoint = Checkpoint(orbax_folder)
    with pytest.raises(CheckpointError, match=r"missing +orbax/toy: the whole module"):
        raise_problems(checkpoint, [bind_toy(checkpoint)])


def test_an_orbax_folder_that_does_not_fit_lists_missing_unknown_and_mis_shaped_parameters(orbax_folder):
    class Other(Toy):
        def __init__(self):
            super().__init__()
            self.second_norm = LayerNorm(12, eps=1e-6)
            self.mlp.up_proj = Linear(12, 24, dtype=jnp.float32)
            del self.norm

    checkpoint = Checkpoint(orbax_folder)
    with pytest.raises(CheckpointError) as refusal:
        raise_problems(checkpoint, [bind(checkpoint, Other, name="toy")])
    lines = str(refusal.value).splitlines()[1:]
    assert any(re.match(r" +missing +second_norm.weight \[12\]", line) for line in lines), lines
    assert any(
        re.match(r" +mis-shaped mlp.up_proj.weight: the folder has \[20, 12\].*\[24, 12\]", line) for line in lines
    ), lines
    assert any(re.match(r" +unknown +norm", line) for line in lines), lines


def test_an_orbax_folder_with_damaged_metadata_is_one_error(orbax_folder):
    for file in (orbax_folder / "orbax" / "toy").glob("*METADATA*"):
        file.write_text("{")
    checkpoint = Checkpoint(orbax_folder)
    with pytest.raises(CheckpointError, match="no readable Orbax checkpoint"):
        bind_toy(checkpoint)
