"""A small module with one parameter of each kind the loader knows, and its checkpoint folder."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from tests.helpers import det
from vitstripe.checkpoint import Binding, Checkpoint, bind
from vitstripe.nn import LayerNorm, Linear, param

EXPERTS = 3
PREFIX = "model.toy."


class Kernel(nnx.Module):
    """A convolution kernel kept as a matrix, flattened from what the file has."""

    def __init__(self):
        self.weight = param((12, 24), jnp.float32, disk_shape=(12, 3, 2, 2, 2))


class ExpertStack(nnx.Module):
    """One [8, 12] matrix an expert, stacked."""

    def __init__(self, dtype):
        self.gate_proj = nnx.Module()
        self.gate_proj.weight = param((EXPERTS, 8, 12), dtype, tp_axis=1, stacked=True)


class Block(nnx.Module):
    def __init__(self, dtype):
        self.up_proj = Linear(12, 20, dtype=dtype, bias=True, tp="out")
        self.down_proj = Linear(20, 12, dtype=dtype, tp="in")
        self.experts = ExpertStack(dtype)


class Toy(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        self.patch_embed = Kernel()
        self.mlp = Block(dtype)
        self.norm = LayerNorm(12, eps=1e-6)


def toy_tensors() -> dict[str, np.ndarray]:
    """What the file holds: bfloat16, non-zero, every tensor different."""
    shapes = {
        "patch_embed.weight": (12, 3, 2, 2, 2),
        "mlp.up_proj.weight": (20, 12),
        "mlp.up_proj.bias": (20,),
        "mlp.down_proj.weight": (12, 20),
        **{f"mlp.experts.{e}.gate_proj.weight": (8, 12) for e in range(EXPERTS)},
        "norm.weight": (12,),
        "norm.bias": (12,),
    }
    return {PREFIX + n: det(s, i).astype(ml_dtypes.bfloat16) for i, (n, s) in enumerate(shapes.items())}


def expected_state(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameter path -> the value it should be loaded with."""
    wide = {n.removeprefix(PREFIX): t.astype(np.float32) for n, t in tensors.items()}
    gates = [wide.pop(f"mlp.experts.{e}.gate_proj.weight") for e in range(EXPERTS)]
    wide["mlp.experts.gate_proj.weight"] = np.stack(gates)
    wide["patch_embed.weight"] = wide["patch_embed.weight"].reshape(12, 24)
    return wide


def write_folder(folder: Path, tensors: dict[str, np.ndarray], files: int = 1) -> Path:
    """A checkpoint folder: one model.safetensors, or `files` parts with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def bind_toy(checkpoint: Checkpoint, dtype=jnp.float32, **options) -> Binding:
    return bind(checkpoint, lambda: Toy(dtype), name="toy", disk_names=lambda path: (PREFIX + path,), **options)


def values(state: nnx.State) -> dict[str, np.ndarray]:
    """Parameter path -> its value on the host."""
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(state)}
