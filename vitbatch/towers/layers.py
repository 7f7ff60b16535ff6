"""Layers that vision towers share. Names are those of Hugging Face checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from vitbatch.attention import attend
from vitbatch.lanes import Segments
from vitstripe import nn


class PatchProjection(nnx.Module):
    """The patch embedding as a matmul: the file's [H, 3, T, P, P] convolution kernel, flattened."""

    def __init__(self, channels: int, temporal: int, patch: int, out_features: int, *, dtype):
        disk = (out_features, channels, temporal, patch, patch)
        self.weight = nn.param((out_features, channels * temporal * patch * patch), dtype, disk_shape=disk)
        self.bias = nn.param((out_features,), dtype)

    def __call__(self, rows: Float[Array, "C F"]) -> Float[Array, "C H"]:
        y = nn.linear(rows, self.weight[...])
        return y + self.bias[...].astype(y.dtype)


class PatchEmbed(nnx.Module):
    """Holds `proj`, as the files name it."""

    def __init__(self, channels: int, temporal: int, patch: int, out_features: int, *, dtype):
        self.proj = PatchProjection(channels, temporal, patch, out_features, dtype=dtype)

    def __call__(self, rows: Float[Array, "C F"]) -> Float[Array, "C H"]:
        return self.proj(rows)


class PositionTable(nnx.Module):
    """A learned square table of positions, read at fractional places by host-planned taps. weight [side^2, H]."""

    def __init__(self, rows: int, features: int, *, dtype):
        self.weight = nn.param((rows, features), dtype)

    def __call__(self, index: Int[Array, "C taps"], weight: Float[Array, "C taps"]) -> Float[Array, "C H"]:
        """The weighted sum of each patch's taps, float32."""
        table = self.weight[...]
        total = jnp.zeros((index.shape[0], table.shape[1]), jnp.float32)
        # One tap at a time: all at once would hold a [C, taps, H] array.
        for tap in range(index.shape[1]):
            read = table.at[index[:, tap]].get(mode="promise_in_bounds").astype(jnp.float32)
            total += read * weight[:, tap, None]
        return total


def axial_rotary(
    positions: Int[Array, "C 2"], head_dim: int, theta: float
) -> tuple[Float[Array, "C J"], Float[Array, "C J"]]:
    """cos and sin of the 2D rotary angles, float32: the first quarter of a head turns with the row, the second with
    the column, at frequencies theta^(-4j/head_dim) (Qwen2-VL's vision rotary embedding)."""
    frequency = theta ** (-np.arange(0, head_dim // 2, 2, dtype=np.float64) / (head_dim // 2))
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequency, jnp.float32)
    angles = angles.reshape(positions.shape[0], head_dim // 2)
    return jnp.cos(angles), jnp.sin(angles)


class FusedAttention(nnx.Module):
    """Multi-head attention with one `qkv` projection (rows ordered q, k, v, then head) and biases."""

    def __init__(self, features: int, num_heads: int, *, dtype):
        self.qkv = nn.Linear(features, 3 * features, dtype=dtype, bias=True)
        self.proj = nn.Linear(features, features, dtype=dtype, bias=True)
        self.num_heads = num_heads

    def __call__(
        self,
        x: Float[Array, "C H"],
        rotary: tuple[Float[Array, "C half"], Float[Array, "C half"]],
        segments: Segments[Array],
        chunk: int,
    ) -> Float[Array, "C H"]:
        C, H = x.shape
        q, k, v = self.qkv(x).reshape(C, 3, self.num_heads, H // self.num_heads).transpose(1, 0, 2, 3)
        cos, sin = (part[:, None] for part in rotary)
        out = attend(nn.rotate_half(q, cos, sin), nn.rotate_half(k, cos, sin), v, segments, chunk=chunk)
        return self.proj(out.reshape(C, H))


class GeluMLP(nnx.Module):
    """linear_fc2(gelu(linear_fc1(x))), both with bias; the GELU in float32, tanh-approximated or exact."""

    def __init__(self, features: int, hidden: int, *, dtype, approximate: bool):
        self.linear_fc1 = nn.Linear(features, hidden, dtype=dtype, bias=True)
        self.linear_fc2 = nn.Linear(hidden, features, dtype=dtype, bias=True)
        self.approximate = approximate

    def __call__(self, x: Float[Array, "C H"]) -> Float[Array, "C H"]:
        h = jax.nn.gelu(self.linear_fc1(x).astype(jnp.float32), approximate=self.approximate)
        return self.linear_fc2(h.astype(x.dtype))
