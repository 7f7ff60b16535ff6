"""Block FP8 checkpoints give exactly what was quantised times its scale, wherever a mesh cuts; others are refused."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests.helpers import det
from vitstripe.checkpoint import Binding, Checkpoint, CheckpointError, bind, load, raise_problems, save_orbax
from vitstripe.nn import Linear, RMSNorm, RowsOf, param

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WIDE, NARROW, EXPERTS = 300, 132, 4
"""No multiples of 128; halves and quarters of them fall inside a block."""


class Stack(nnx.Module):
    def __init__(self, shape, dtype, tp_axis, rows_of=None):
        self.weight = param(shape, dtype, tp_axis=tp_axis, stacked=True, rows_of=rows_of)


class Block(nnx.Module):
    """One weight of each kind: cut by rows, by columns, not at all; two that share a tensor; experts cut and dealt."""

    def __init__(self, dtype):
        self.up_proj = Linear(NARROW, WIDE, dtype=dtype, bias=True, tp="out")
        self.down_proj = Linear(WIDE, NARROW, dtype=dtype, tp="in")
        self.whole = Linear(NARROW, 5, dtype=dtype)
        self.q_proj = Linear(NARROW, 100, dtype=dtype, tp="out", rows_of=RowsOf("qk_proj.weight", 0, 260))
        self.k_proj = Linear(NARROW, 160, dtype=dtype, tp="out", rows_of=RowsOf("qk_proj.weight", 100, 260))
        self.experts = nnx.Module()
        self.experts.gate_proj = Stack((EXPERTS, 140, NARROW), dtype, 1)
        self.experts.up_proj = Stack((EXPERTS, 140, NARROW), dtype, 0)
        self.experts.a = Stack((EXPERTS, 140, NARROW), dtype, 0, RowsOf("fused", 0, 280))
        self.experts.b = Stack((EXPERTS, 140, NARROW), dtype, 1, RowsOf("fused", 140, 280))
        self.norm = RMSNorm(NARROW, eps=1e-6)


def quantised(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float8 weights, float32 scales a block, and their product in float32. Each block has a scale of its own."""
    q = (30 * det(shape, seed)).astype(ml_dtypes.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = (1.5 + det(blocks, seed + 1)).astype(np.float32)
    spread = scales.repeat(128, -2)[..., : shape[-2], :].repeat(128, -1)[..., : shape[-1]]
    return q, scales, q.astype(np.float32) * spread


def write(folder, tensors: dict[str, np.ndarray], config: dict) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"} | config))
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def files(end: str = "_scale_inv") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What a quantised file holds, and the same weights in float32 under the names of the parameters."""
    shapes = {
        "up_proj.weight": (WIDE, NARROW),
        "down_proj.weight": (NARROW, WIDE),
        "qk_proj.weight": (260, NARROW),
        **{f"experts.{e}.{n}_proj.weight": (140, NARROW) for e in range(EXPERTS) for n in ("gate", "up")},
        "experts.fused": (EXPERTS, 280, NARROW),
    }
    held, plain = {}, {}
    for i, (name, shape) in enumerate(shapes.items()):
        held[name], held[name + end], plain[name] = quantised(shape, 10 * i)
    # Named in modules_to_not_convert, and so in the file as it is.
    kept = {"whole.weight": (5, NARROW), "up_proj.bias": (WIDE,), "norm.weight": (NARROW,)}
    for i, (name, shape) in enumerate(kept.items()):
        held[name] = det(shape, 200 + i).astype(ml_dtypes.bfloat16)
        plain[name] = held[name].astype(np.float32)
    both = plain.pop("qk_proj.weight")
    plain |= {"q_proj.weight": both[:100], "k_proj.weight": both[100:]}
    fused = plain.pop("experts.fused")
    plain |= {"experts.a.weight": fused[:, :140], "experts.b.weight": fused[:, 140:]}
    for n in ("gate", "up"):
        one = [plain.pop(f"experts.{e}.{n}_proj.weight") for e in range(EXPERTS)]
        plain[f"experts.{n}_proj.weight"] = np.stack(one)
    return held, plain


def bound(checkpoint: Checkpoint, dtype=jnp.float32) -> Binding:
    return bind(checkpoint, lambda: Block(dtype), name="block")


def loaded(checkpoint: Checkpoint, mesh, dtype=jnp.float32) -> dict[str, jax.Array]:
    binding = bound(checkpoint, dtype)
    raise_problems(checkpoint, [binding])
    flat = nnx.to_flat_state(load(checkpoint, binding, mesh))
    return {".".join(map(str, path)): v.get_value() for path, v in flat}


@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_weight_is_its_float8_value_times_its_block_s_scale(tmp_path, mesh_of, tp, dtype):
    held, plain = files()
    found = loaded(write(tmp_path, held, {"quantization_config": FP8}), mesh_of(tp), dtype)
    assert found.keys() == plain.keys()
    for name, expected in plain.items():
        wanted = expected if name == "norm.weight" else expected.astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(found[name]), wanted, err_msg=name)
        assert len(found[name].addressable_shards) == tp


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_of_quark_files_have_a_scale_of_another_name(tmp_path, mesh_of, tp):
    held, plain = files("_scale")
    quark = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block"}}}
    found = loaded(write(tmp_path, held, {"quantization_config": quark}), mesh_of(tp))
    for name, expected in plain.items():
        np.testing.assert_array_equal(np.asarray(found[name]), expected, err_msg=name)


def test_blocks_of_another_size_are_those_that_the_config_names(tmp_path, mesh_of):
    q = (30 * det((10, 24), 1)).astype(ml_dtypes.float8_e4m3fn)
    scales = (1.5 + det((3, 2), 2)).astype(np.float32)
    config = {"text_config": {"quantization_config": FP8 | {"weight_block_size": [4, 16]}}}
    checkpoint = write(tmp_path, {"weight": q, "weight_scale_inv": scales}, config)
    binding = bind(checkpoint, lambda: Linear(24, 10, dtype=jnp.float32, tp="out"), name="one")
    raise_problems(checkpoint, [binding])
    [(_, weight)] = nnx.to_flat_state(load(checkpoint, binding, mesh_of(2)))
    spread = scales.repeat(4, 0)[:10].repeat(16, 1)[:, :24]
    np.testing.assert_array_equal(np.asarray(weight.get_value()), q.astype(np.float32) * spread)


def test_float8_weights_are_put_on_the_devices_before_they_are_scaled(tmp_path, mesh_of, monkeypatch):
    """A byte a weight goes to a device, in the part it keeps."""
    held, _ = files()
    sent = []
    real = jax.device_put

    def put(value, *args, **kwargs):
        sent.append((value.dtype, value.nbytes))
        return real(value, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", put)
    loaded(write(tmp_path, held, {"quantization_config": FP8}), mesh_of(2), jnp.bfloat16)
    assert sum(n for dtype, n in sent if dtype == ml_dtypes.float8_e4m3fn) == sum(
        t.nbytes for t in held.values() if t.dtype == ml_dtypes.float8_e4m3fn
    )
    assert max(n for dtype, n in sent if dtype != ml_dtypes.float8_e4m3fn) < 5 * NARROW * 3


def test_a_quantised_checkpoint_converts_to_orbax_as_what_it_stands_for(tmp_path, mesh_of):
    held, plain = files()
    source = write(tmp_path / "fp8", held, {"quantization_config": FP8})
    state = load(source, bound(source), mesh_of(1))
    save_orbax(tmp_path / "orbax", source, {"block": state})
    found = loaded(Checkpoint(tmp_path / "orbax"), mesh_of(2))
    for name, expected in plain.items():
        np.testing.assert_array_equal(np.asarray(found[name]), expected, err_msg=name)


def test_one_error_lists_scales_that_are_missing_or_of_another_shape(tmp_path):
    held, _ = files()
    del held["up_proj.weight_scale_inv"]
    held["qk_proj.weight_scale_inv"] = np.ones((4, 2), np.float32)
    held["norm.weight"] = held["norm.weight"].astype(ml_dtypes.float8_e4m3fn)
    checkpoint = write(tmp_path, held, {"quantization_config": FP8})
    assert sorted(bound(checkpoint).problems) == [
        "mis-shaped norm.weight: float8 with 1 dimension(s) has no blocks",
        "mis-shaped qk_proj.weight_scale_inv: the file has [4, 2], blocks of 128 x 128 want [3, 2]",
        "missing   up_proj.weight_scale_inv [3, 2], the scales of a float8 tensor",
    ]


@pytest.mark.parametrize(
    ("quantisation", "text"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' is not loaded: use a checkpoint in bfloat16"),
        ({"quant_method": "fp8", "weight_block_size": None}, "without weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is \\[128\\]; it must be two"),
        ({"quant_method": "quark"}, "quant_method 'quark' with MXFP4 weights \\(1 tensors, whole.weight among them\\)"),
    ],
)
def test_other_kinds_are_refused_by_name_with_what_to_use_instead(tmp_path, quantisation, text):
    held, _ = files()
    held |= {"whole.weight": np.ones((5, NARROW // 2), np.uint8), "whole.weight_scale": np.ones((5, 5), np.uint8)}
    checkpoint = write(tmp_path, held, {"quantization_config": quantisation})
    with pytest.raises(CheckpointError, match=text) as caught:
        bound(checkpoint)
    assert "must be two" in text or "quant_method 'fp8' with weight_block_size" in str(caught.value)
