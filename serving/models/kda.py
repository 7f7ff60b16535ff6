"""Kimi delta attention (KDA) as GLM-5.3-Flash has it: a short convolution, then the delta rule with a decay for every
key channel, then a gated norm. What a request carries does not grow: the last rows before the convolution, and a matrix
[K, V] a head."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from serving.models.decoder import CacheArray
from serving.models.delta_rule import delta_rule, l2_normalise
from serving.models.shards import Shards, local_heads
from serving.models.short_conv import short_conv
from serving.models.step import Step
from vitstripe.nn import Linear, RMSNorm, param


@dataclass(frozen=True)
class KdaConfig:
    """heads H of head_dim channels, for keys and values alike. taps: of the convolution. lower_bound: the least log
    decay of a step, which the sigmoid form of the gate approaches; None for the softplus form, which has none.
    norm_eps: of the norm of the output."""

    hidden_size: int
    heads: int
    head_dim: int
    taps: int
    lower_bound: float | None
    norm_eps: float


class TapsOf(nnx.Module):
    """The taps of a convolution by channel, float32: [C, L], [C, 1, L] in the file."""

    def __init__(self, channels: int, taps: int, *, tp_axis: int | None):
        self.weight = param((channels, taps), jnp.float32, tp_axis=tp_axis, disk_shape=(channels, 1, taps))


def log_decay(
    f: Float32[Array, "T H K"], log_rate: Float32[Array, " H"], lower_bound: float | None
) -> Float32[Array, "T H K"]:
    """The log of what each key channel of the state keeps at a step, at most 0."""
    rate = jnp.exp(log_rate)[:, None]
    return -rate * jax.nn.softplus(f) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * f)


class KimiDeltaAttention(nnx.Module):
    """The mixer of one layer; heads are cut over the mesh, and with them the state."""

    def __init__(self, c: KdaConfig, *, dtype, shards: Shards):
        out, into = ("out", "in") if shards.heads else (None, None)
        axis, width = 0 if shards.heads else None, c.heads * c.head_dim
        self.q_proj, self.k_proj, self.v_proj = (Linear(c.hidden_size, width, dtype=dtype, tp=out) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (TapsOf(width, c.taps, tp_axis=axis) for _ in range(3))
        self.f_a_proj = Linear(c.hidden_size, c.head_dim, dtype=dtype)
        self.f_b_proj = Linear(c.head_dim, width, dtype=dtype, tp=out)
        self.dt_bias = param((width,), jnp.float32, tp_axis=axis)
        self.A_log = param((c.heads,), jnp.float32, tp_axis=axis)
        self.b_proj = Linear(c.hidden_size, c.heads, dtype=dtype, tp=out)
        self.g_a_proj = Linear(c.hidden_size, c.head_dim, dtype=dtype)
        self.g_b_proj = Linear(c.head_dim, width, dtype=dtype, tp=out)
        self.o_norm = RMSNorm(c.head_dim, eps=c.norm_eps)
        self.o_proj = Linear(width, c.hidden_size, dtype=dtype, tp=into)
        self.config, self.shards = c, shards

    def caches(self) -> dict[str, CacheArray]:
        """The rows before the convolution, [L - 1, (q, k, v), H * K], and the state [H, K, V] in float32."""
        c, cut = self.config, self.shards.heads
        return {
            "conv": CacheArray((c.taps - 1, 3, c.heads * c.head_dim), cut=2 if cut else None, per_request=True),
            "state": CacheArray(
                (c.heads, c.head_dim, c.head_dim), cut=0 if cut else None, per_request=True, dtype=jnp.float32
            ),
        }

    @jax.named_scope("mixer")
    def __call__(self, x: Float[Array, "T D"], cache, step: Step):
        """(y [T, D], the layer's cache)."""
        c, dim = self.config, self.config.head_dim
        rows = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        taps = jnp.concatenate([conv.weight[...] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        kept = cache["conv"]
        rows, ends = short_conv(rows, taps, kept.reshape(*kept.shape[:2], -1), step)
        q, k, v = (local_heads(part, dim) for part in jnp.split(rows, 3, -1))
        f = self.f_b_proj(self.f_a_proj(x)).astype(jnp.float32) + self.dt_bias[...]
        g = log_decay(local_heads(f, dim), self.A_log[...], c.lower_bound)
        beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
        q, k, floor = l2_normalise(q) * dim**-0.5, l2_normalise(k), c.lower_bound
        o, state = delta_rule(q, k, v, g, beta, cache["state"], step, gate_floor=floor)
        gate = jax.nn.sigmoid(local_heads(self.g_b_proj(self.g_a_proj(x)).astype(jnp.float32), dim))
        y = (self.o_norm(o) * gate).astype(x.dtype).reshape(x.shape[0], -1)
        return (
            self.shards.sum_if(self.shards.heads, self.o_proj(y)),
            {**cache, "conv": ends.reshape(kept.shape), "state": state},
        )
