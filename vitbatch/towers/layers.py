"""Layers that vision towers share. Names are those of Hugging Face checkpoints."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from vitbatch.config import VisionConfig
from vitstripe import nn
from vitstripe.platform import Platform, default_platform

Rotary = tuple[Float[Array, "C half"], Float[Array, "C half"]]
"""cos and sin of every patch, see `axial_rotary`."""

Attend = Callable[[Float[Array, "C H D"], Float[Array, "C H D"], Float[Array, "C G D"]], Float[Array, "C H D"]]
"""Attention over a lane, which knows who sees whom: (q, k, v) -> out. The values are the last H heads of v."""


class Linear(nn.Linear):
    """nn.Linear whose product comes out in x's dtype: only then do a GPU's matmul libraries take the bias along, and
    the GELU or the sum that follows it. Their matrix units accumulate in float32 whatever comes out."""

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        y = lax.dot_general(x, self.weight[...], dims, preferred_element_type=x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class FlatConvolution(nnx.Module):
    """A convolution whose stride is its kernel, as a matmul over rows that hold one kernel's input each.

    disk_shape: of the kernel in the file, [out, in, ...]. disk_axes: the order of its axes in a row, `in` and what
    follows it flattened; None where it is the file's own.
    """

    def __init__(
        self, disk_shape: tuple[int, ...], *, dtype, bias: bool = True, disk_axes: tuple[int, ...] | None = None
    ):
        out_features, row = disk_shape[0], int(np.prod(disk_shape[1:]))
        self.weight = nn.param((out_features, row), dtype, disk_shape=disk_shape, disk_axes=disk_axes)
        self.bias = nn.param((out_features,), dtype) if bias else None

    def __call__(self, rows: Float[Array, "N F"]) -> Float[Array, "N H"]:
        y = nn.linear(rows, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class PatchEmbed(nnx.Module):
    """Holds `proj`, as the files name it. A row is (channel, frame, y, x)."""

    def __init__(self, config: VisionConfig, *, dtype, bias: bool = True):
        patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = FlatConvolution((config.hidden_size, *patch), dtype=dtype, bias=bias)

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
    positions: Int[Array, "C 2"], head_dim: int, theta: float, *, platform: Platform | None = None
) -> Rotary:
    """cos and sin of the 2D rotary angles, float32: the first quarter of a head turns with the row, the second with
    the column, at frequencies theta^(-4j/head_dim) (Qwen2-VL's vision rotary embedding). platform: what it is compiled
    for; None is the first device's."""
    frequency = theta ** (-np.arange(0, head_dim // 2, 2, dtype=np.float64) / (head_dim // 2))
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequency, jnp.float32)

    def turn(angles: Float[Array, "*B"]) -> Rotary:
        return jnp.cos(angles), jnp.sin(angles)

    if (platform or default_platform()).kind == "cpu":
        # A loop over the two axes, with which XLA fuses nothing: it would take the cosines again in every block, once a
        # head.
        cos, sin = lax.map(turn, angles.swapaxes(0, 1))
        return jnp.concatenate([*cos], -1), jnp.concatenate([*sin], -1)
    return turn(angles.reshape(positions.shape[0], head_dim // 2))


class FusedAttention(nnx.Module):
    """Multi-head attention with one `qkv` projection, rows ordered q, k, v, then head.

    qkv_bias, proj_bias: whether the projections have biases. qk_norm_eps: epsilon of the RMSNorms over each head's
    queries and keys before the rotary embedding; None for a tower without them.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        dtype,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm_eps: float | None = None,
    ):
        self.qkv = Linear(features, 3 * features, dtype=dtype, bias=qkv_bias)
        self.proj = Linear(features, features, dtype=dtype, bias=proj_bias)
        self.num_heads = num_heads
        normed = qk_norm_eps is not None
        self.q_norm = nn.RMSNorm(features // num_heads, eps=qk_norm_eps) if normed else None
        self.k_norm = nn.RMSNorm(features // num_heads, eps=qk_norm_eps) if normed else None

    def __call__(self, x: Float[Array, "C H"], rotary: Rotary, attend: Attend) -> Float[Array, "C H"]:
        C, H = x.shape
        qkv = self.qkv(x).reshape(C, 3 * self.num_heads, H // self.num_heads)
        q, k = qkv[:, : self.num_heads], qkv[:, self.num_heads : 2 * self.num_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (part[:, None] for part in rotary)
        out = attend(nn.rotate_half(q, cos, sin), nn.rotate_half(k, cos, sin), qkv)
        return self.proj(out.reshape(C, H))


class GeluMLP(nnx.Module):
    """linear_fc2(gelu(linear_fc1(x))), both with bias; the GELU tanh-approximated, in x's dtype, or exact, in
    float32."""

    def __init__(self, features: int, hidden: int, *, dtype, approximate: bool):
        self.linear_fc1 = Linear(features, hidden, dtype=dtype, bias=True)
        self.linear_fc2 = Linear(hidden, features, dtype=dtype, bias=True)
        self.approximate = approximate

    def __call__(self, x: Float[Array, "C H"]) -> Float[Array, "C H"]:
        h = self.linear_fc1(x)
        if self.approximate:
            # On a GPU this is part of the matmul before it, which sees float32.
            return self.linear_fc2(jax.nn.gelu(h, approximate=True))
        return self.linear_fc2(jax.nn.gelu(h.astype(jnp.float32), approximate=False).astype(x.dtype))


class SwiGLU(nnx.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), the product in float32.

    limit: GLM-5-Next's clamp, gate <= limit and -limit <= up <= limit; None for none.
    """

    def __init__(self, features: int, hidden: int, *, dtype, bias: bool, limit: float | None = None):
        self.gate_proj = Linear(features, hidden, dtype=dtype, bias=bias)
        self.up_proj = Linear(features, hidden, dtype=dtype, bias=bias)
        self.down_proj = Linear(hidden, features, dtype=dtype, bias=bias)
        self.limit = limit

    def __call__(self, x: Float[Array, "N H"]) -> Float[Array, "N H"]:
        gate, up = self.gate_proj(x).astype(jnp.float32), self.up_proj(x).astype(jnp.float32)
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))


class RmsBlock(nnx.Module):
    """x += attention(RMS(x)); x += SwiGLU(RMS(x))."""

    def __init__(self, features: int, *, eps: float, attn: FusedAttention, mlp: SwiGLU):
        self.norm1 = nn.RMSNorm(features, eps=eps)
        self.norm2 = nn.RMSNorm(features, eps=eps)
        self.attn, self.mlp = attn, mlp

    def __call__(self, x: Float[Array, "C H"], rotary: Rotary, attend: Attend) -> Float[Array, "C H"]:
        x = x + self.attn(self.norm1(x), rotary, attend)
        return x + self.mlp(self.norm2(x))


class Downsample(FlatConvolution):
    """GLM's step from patches to tokens: a convolution over the patches of a merge block, H -> O."""

    def __init__(self, config: VisionConfig, *, dtype):
        side = config.merge_size
        # A merge block's rows stand one after the other, so a joined row is (y, x, feature).
        disk = (config.out_hidden_size, config.hidden_size, side, side)
        super().__init__(disk, dtype=dtype, disk_axes=(0, 2, 3, 1))
        self.joined = config.hidden_size * config.patches_per_token

    def __call__(self, x: Float[Array, "C H"]) -> Float[Array, "T O"]:
        return super().__call__(x.reshape(-1, self.joined))


class GatedMerger(SwiGLU):
    """GLM's merger over tokens: y = gelu(LN(proj(x))), then SwiGLU(y) without biases. The GELU is exact."""

    def __init__(self, features: int, hidden: int, *, dtype, limit: float | None = None):
        super().__init__(features, hidden, dtype=dtype, bias=False, limit=limit)
        self.proj = Linear(features, features, dtype=dtype)
        # Not the config's epsilon: the reference leaves torch's default here.
        self.post_projection_norm = nn.LayerNorm(features, eps=1e-5)

    def __call__(self, x: Float[Array, "T O"]) -> Float[Array, "T O"]:
        y = self.post_projection_norm(self.proj(x)).astype(jnp.float32)
        return super().__call__(jax.nn.gelu(y, approximate=False).astype(x.dtype))
