"""A miniature of one layer, to try the training loop with: which of four directions is a point in?"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scripts.lib.miniature.spec import Batch, Job, Part, Scores, Suite
from vitstripe.nn import Linear, RMSNorm

ROWS, WIDTH, CLASSES = 48, 6, 4


class Layer(nnx.Module):
    def __init__(self, dtype):
        self.norm = RMSNorm(WIDTH, eps=1e-6)
        self.up_proj = Linear(WIDTH, 16, dtype=dtype)
        self.down_proj = Linear(16, CLASSES, dtype=dtype, bias=True)


class Toy:
    """See spec.Miniature."""

    name, tasks = "toy", ("direction", "never asked")
    suites: Mapping[str, Suite] = {"held-out": Suite("Held out", ("points",), 2, {"direction": 0.9})}

    def parts(self, dtype: Any) -> Mapping[str, Part]:
        return {"layer": Part(lambda: Layer(dtype), lambda path: f"model.{path}")}

    def files(self) -> Mapping[str, str]:
        return {"config.json": "{}"}

    def program(self, job: Job) -> str:
        return "points"

    def shapes(self, program: str) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {
            "x": jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32),
            "y": jax.ShapeDtypeStruct((ROWS,), np.int32),
        }

    def draw(self, job: Job) -> Batch:
        x = job.generator().normal(size=(ROWS, WIDTH)).astype(np.float32)
        return {"x": x, "y": (2 * (x[:, 0] > 0) + (x[:, 3] > 0)).astype(np.int32)}

    def score(self, modules: Mapping[str, nnx.Module], batch: Mapping[str, jax.Array], program: str) -> Scores:
        layer = modules["layer"]
        assert isinstance(layer, Layer)
        logits = layer.down_proj(jax.nn.relu(layer.up_proj(layer.norm(batch["x"]))))
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()
        return Scores(loss, jnp.zeros(ROWS, jnp.int32), logits.argmax(-1) == batch["y"], {"largest": logits.max()})

    def card(self) -> Mapping[str, str]:
        return {part: f"The {part}." for part in ("summary", "data", "input", "limits", "licence")}


def make(preset: str) -> Toy:
    return Toy()
