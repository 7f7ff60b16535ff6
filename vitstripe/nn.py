"""Layers with the parameter names and layouts of Hugging Face checkpoints, so that loading is a lookup by name.

Each nnx.Param carries metadata the loader reads:
  tp_axis     the dimension cut over the tensor-parallel mesh axis, or None for replicated
  disk_shape  the shape in the file when it differs from the parameter's (a convolution kernel, say)
  disk_axes   the order in which the file's axes are taken before they are flattened into the parameter's shape
  stacked     True when dimension 0 stacks one tensor an expert: `experts.gate_proj.weight` is read from
              `experts.0.gate_proj.weight`, `experts.1.gate_proj.weight`, ...
  rows_of     the larger tensor the file may hold this parameter in, see RowsOf, or None
Parameters are made with their global shapes; inside shard_map the same module sees its device's part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


@dataclass(frozen=True)
class RowsOf:
    """Where a parameter is found when the file holds no tensor of its own name: in rows [start, start + n), n its own
    rows, of a tensor with `rows` rows. name: of that tensor, in the place of the last two parts of the parameter's path
    ("gate_up_proj.weight" for "mlp.up_proj.weight"). A stacked parameter's larger tensor is [E, rows, ...]."""

    name: str
    start: int
    rows: int


def param(
    shape: tuple[int, ...],
    dtype,
    *,
    tp_axis: int | None = None,
    disk_shape: tuple[int, ...] | None = None,
    disk_axes: tuple[int, ...] | None = None,
    stacked: bool = False,
    rows_of: RowsOf | None = None,
) -> nnx.Param:
    """A zero parameter with the loader's metadata. Build models under nnx.eval_shape: nothing is allocated."""
    value = jnp.zeros(shape, dtype)
    return nnx.Param(
        value,
        tp_axis=tp_axis,
        disk_shape=disk_shape or shape,
        disk_axes=disk_axes,
        stacked=stacked,
        rows_of=rows_of,
    )


def linear(x: Float[Array, "*B I"], weight: Float[Array, "O I"]) -> Float[Array, "*B O"]:
    """x @ weight^T with float32 accumulation, in x's dtype."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32).astype(x.dtype)


class Linear(nnx.Module):
    """y = x W^T (+ b). weight [out, in]. `tp` cuts the rows ("out") or the columns ("in") over the mesh;
    after an "in" layer the caller sums over the mesh axis, and such a layer has no bias. rows_of: of the weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype,
        bias: bool = False,
        tp: str | None = None,
        rows_of: RowsOf | None = None,
    ):
        if tp == "in" and bias:
            raise ValueError("a bias on a column-cut layer would be added once a device")
        axis = {None: None, "out": 0, "in": 1}[tp]
        self.weight = param((out_features, in_features), dtype, tp_axis=axis, rows_of=rows_of)
        self.bias = param((out_features,), dtype, tp_axis=axis) if bias else None

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        y = linear(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class LayerNorm(nnx.Module):
    """Mean-subtracting LayerNorm over the last axis, float32 inside, in x's dtype."""

    def __init__(self, features: int, *, eps: float):
        self.weight = param((features,), jnp.float32)
        self.bias = param((features,), jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        h = x.astype(jnp.float32)
        h = h - h.mean(-1, keepdims=True)
        h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + self.eps)
        return (h * self.weight[...] + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """w * x / sqrt(mean(x^2) + eps) over the last axis, float32 inside, in x's dtype."""

    def __init__(self, features: int, *, eps: float):
        self.weight = param((features,), jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        h = x.astype(jnp.float32)
        h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + self.eps)
        return (h * self.weight[...]).astype(x.dtype)


def rotate_half(
    x: Float[Array, "*B D"], cos: Float[Array, "*#B H"], sin: Float[Array, "*#B H"]
) -> Float[Array, "*B D"]:
    """Rotary embedding on pairs (j, j + D/2); cos and sin hold D/2 angles. float32 inside, in x's dtype."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rotate_pairs(
    x: Float[Array, "*B D"], cos: Float[Array, "*#B H"], sin: Float[Array, "*#B H"]
) -> Float[Array, "*B D"]:
    """Rotary embedding on pairs (2j, 2j + 1), the layout kept. float32 inside, in x's dtype."""
    h = x.astype(jnp.float32)
    a, b = h[..., 0::2], h[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape).astype(x.dtype)


def traced_once(*context: Any) -> Callable[..., Any]:
    """run(block, *args) = block(*args, *context), traced and lowered once for all blocks that differ in weights alone.

    Twenty-seven unrolled blocks take most of a warm-up to lower, once a program and again for each hit of the disk
    cache. Make it inside the traced function: `context` may hold its arrays, and values that are not arrays.
    """

    @partial(jax.jit, static_argnums=0)
    def call(graphdef: Any, state: nnx.State, *args: Any) -> Any:
        return nnx.merge(graphdef, state)(*args, *context)

    return lambda block, *args: call(*nnx.split(block), *args)
