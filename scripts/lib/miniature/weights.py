"""Parameters in training: float32 masters by path, the modules they are cast into, the tensors they are saved as."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from scripts.lib.miniature.spec import Part

Params = dict[str, jax.Array]
"""`part:dotted.path` -> float32 array."""

# The layers that write into the residual stream; they start smaller the deeper the model.
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")
_WORDS, _PLACES = "embed_tokens.weight", "pos_embed.weight"
_TABLE_SCALE = 0.05
_PLACE_SCALE = 0.5


class Weights:
    """The parameters of a miniature's parts. Modules are made abstractly once; nothing but `Params` is allocated."""

    def __init__(self, parts: Mapping[str, Part]):
        self._parts = parts
        self._split = {name: nnx.split(nnx.eval_shape(part.build)) for name, part in parts.items()}
        self._flat = {
            f"{name}:{'.'.join(map(str, path))}": variable
            for name, (_, abstract) in self._split.items()
            for path, variable in nnx.to_flat_state(abstract)
        }

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {path: jax.ShapeDtypeStruct(v.get_value().shape, jnp.float32) for path, v in self._flat.items()}

    @property
    def count(self) -> int:
        """Parameters in all."""
        return sum(math.prod(value.shape) for value in self.shapes().values())

    def initial(self, seed: int) -> Params:
        """Normal matrices of variance 1 / inputs, smaller where they write into the residual stream; ones for norms,
        zeros for biases; waves over a table of places."""
        depth = max(1, sum(path.endswith("o_proj.weight") for path in self._flat))
        key, params = jax.random.key(seed), {}
        for index, (path, value) in enumerate(self.shapes().items()):
            if len(value.shape) < 2:
                fill = jnp.ones if path.endswith(".weight") else jnp.zeros
                params[path] = fill(value.shape, jnp.float32)
                continue
            if path.endswith(_PLACES):
                params[path] = jnp.asarray(_waves(*value.shape))
                continue
            scale = _TABLE_SCALE if path.endswith(_WORDS) else value.shape[-1] ** -0.5
            if path.endswith(_RESIDUAL):
                scale /= math.sqrt(2 * depth)
            params[path] = scale * jax.random.normal(jax.random.fold_in(key, index), value.shape, jnp.float32)
        return params

    def modules(self, params: Mapping[str, jax.Array]) -> dict[str, nnx.Module]:
        """The modules with every parameter cast to its own dtype; differentiable, to be called inside a program."""
        made = {}
        for name, (graphdef, abstract) in self._split.items():
            flat = [
                (path, v.replace(params[f"{name}:{'.'.join(map(str, path))}"].astype(v.get_value().dtype)))
                for path, v in nnx.to_flat_state(abstract)
            ]
            made[name] = nnx.merge(graphdef, nnx.from_flat_state(flat))
        return made

    def tensors(self, params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """bfloat16 tensors by their name in the file, in the file's shapes."""
        tensors = {}
        for path, variable in self._flat.items():
            name, dotted = path.split(":")
            value = np.asarray(params[path], np.float32).astype(ml_dtypes.bfloat16)
            if axes := variable.get_metadata("disk_axes"):
                shape = [variable.get_metadata("disk_shape")[axis] for axis in axes]
                value = value.reshape(shape).transpose(np.argsort(axes))
            value = value.reshape(variable.get_metadata("disk_shape"))
            if not variable.get_metadata("stacked"):
                tensors[self._parts[name].tensor(dotted)] = np.ascontiguousarray(value)
                continue
            head, _, tail = dotted.partition("experts.")
            for expert, row in enumerate(value):
                tensors[self._parts[name].tensor(f"{head}experts.{expert}.{tail}")] = np.ascontiguousarray(row)
        return tensors


def _waves(places: int, width: int) -> np.ndarray:
    """float32 [places, width]: sines and cosines of the row and the column in a square table, from half a wave to a
    quarter of the side a wave. As strong as what a patch shows, so that places are told apart from the start."""
    side, number = math.isqrt(places), -(-width // 4)
    angles = np.arange(side)[:, None] / side * math.pi * np.geomspace(1, 8, number)
    wave = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    rows, columns = np.repeat(wave, side, 0), np.tile(wave, (side, 1))
    return (_PLACE_SCALE * np.concatenate([rows, columns], 1)[:, :width]).astype(np.float32)


def rounded(params: Mapping[str, jax.Array]) -> Params:
    """The parameters as the saved file holds them."""
    return {path: value.astype(jnp.bfloat16).astype(jnp.float32) for path, value in params.items()}
