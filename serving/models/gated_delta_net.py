"""The gated delta net as Qwen3.5 has it: a short convolution, the delta rule with one decay a head, a gated norm.

What a request carries does not grow: the last rows before the convolution, and a matrix [K, V] a value head.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from serving.models.decoder import CacheArray
from serving.models.delta_rule import delta_rule, l2_normalise
from serving.models.shards import Shards, local_heads
from serving.models.short_conv import short_conv
from serving.models.step import Step
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import Linear, RMSNorm, RowsOf, param


@dataclass(frozen=True)
class DeltaNetConfig:
    """key_heads of key_dim channels; value_heads of value_dim, a multiple of key_heads: value head j reads key head
    j // (value_heads / key_heads). taps: of the convolution. norm_eps: of the norm of the output. Raises
    CheckpointError."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads {self.value_heads} is no multiple of linear_num_key_heads "
                f"{self.key_heads}"
            )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


def why_not(tensor: str) -> str | None:
    """Why a checkpoint that has the tensor is not loaded, or None. Qwen3-Next's projections hold the rows of q, k, v
    and z, and of b and a, one key head after another: cut as Qwen3.5's are, they would be other rows."""
    if not tensor.endswith(("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")):
        return None
    return (
        f"{tensor} is a projection as Qwen3-Next fuses it, its rows interleaved by key head, which is not loaded; use "
        "a checkpoint with in_proj_qkv, in_proj_z, in_proj_b and in_proj_a"
    )


class _Taps(nnx.Module):
    """The convolution's taps of some of the channels, float32 [F, L]; [F, 1, L] rows of conv1d.weight in the file."""

    def __init__(self, channels: int, taps: int, *, tp_axis: int | None, rows_of: RowsOf):
        disk_shape = (channels, 1, taps)
        self.weight = param((channels, taps), jnp.float32, tp_axis=tp_axis, disk_shape=disk_shape, rows_of=rows_of)


class GatedDeltaNet(nnx.Module):
    """The mixer of one layer, cut by value heads. Key heads are cut with them where they divide too, or are the same
    on every device. q, k and v are one tensor in the file and three parameters here, for each is cut by itself."""

    def __init__(self, c: DeltaNetConfig, *, dtype, shards: Shards):
        self.cut = shards.tp > 1 and c.value_heads % shards.tp == 0
        self.cuts_keys = self.cut and c.key_heads % shards.tp == 0
        out, axis = ("out", 0) if self.cut else (None, None)
        key_out, key_axis = ("out", 0) if self.cuts_keys else (None, None)
        q, k, v = c.widths

        def proj(width: int, start: int, tp: str | None) -> Linear:
            rows_of = RowsOf("in_proj_qkv.weight", start, q + k + v)
            return Linear(c.hidden_size, width, dtype=dtype, tp=tp, rows_of=rows_of)

        def taps(width: int, start: int, tp_axis: int | None) -> _Taps:
            return _Taps(width, c.taps, tp_axis=tp_axis, rows_of=RowsOf("conv1d.weight", start, q + k + v))

        self.q_proj, self.k_proj, self.v_proj = proj(q, 0, key_out), proj(k, q, key_out), proj(v, q + k, out)
        self.q_conv, self.k_conv, self.v_conv = taps(q, 0, key_axis), taps(k, q, key_axis), taps(v, q + k, axis)
        self.in_proj_z = Linear(c.hidden_size, v, dtype=dtype, tp=out)
        self.in_proj_b = Linear(c.hidden_size, c.value_heads, dtype=dtype, tp=out)
        self.in_proj_a = Linear(c.hidden_size, c.value_heads, dtype=dtype, tp=out)
        self.A_log = param((c.value_heads,), jnp.float32, tp_axis=axis)
        self.dt_bias = param((c.value_heads,), jnp.float32, tp_axis=axis)
        self.norm = RMSNorm(c.value_dim, eps=c.norm_eps)
        self.out_proj = Linear(v, c.hidden_size, dtype=dtype, tp="in" if self.cut else None)
        self.config, self.shards = c, shards

    def caches(self) -> dict[str, CacheArray]:
        """The rows before the convolution, [L - 1, F], and the state [value heads, K, V] in float32. A device's part of
        F is its own q, k and v channels, those of key heads that every device has among them."""
        c, (q, k, v) = self.config, self.config.widths
        keys = (q + k) * (self.shards.tp if self.cut and not self.cuts_keys else 1)
        conv = CacheArray((c.taps - 1, keys + v), cut=1 if self.cut else None, per_request=True)
        shape = (c.value_heads, c.key_dim, c.value_dim)
        state = CacheArray(shape, cut=0 if self.cut else None, per_request=True, dtype=jnp.float32)
        return {"conv": conv, "state": state}

    @jax.named_scope("mixer")
    def __call__(self, x: Float[Array, "T D"], cache, step: Step):
        """(y [T, D], the layer's cache)."""
        c = self.config
        projected = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        taps = jnp.concatenate([conv.weight[...] for conv in (self.q_conv, self.k_conv, self.v_conv)])
        rows, carried = short_conv(jnp.concatenate(projected, -1), taps, cache["conv"], step)
        keys = projected[0].shape[1]
        q, k = (local_heads(rows[:, at : at + keys], c.key_dim) for at in (0, keys))
        v = local_heads(rows[:, 2 * keys :], c.value_dim)
        head = self._key_head_of(v.shape[1])
        q, k = (l2_normalise(q) * c.key_dim**-0.5)[:, head], l2_normalise(k)[:, head]
        rate = jnp.exp(self.A_log[...])
        g = -rate * jax.nn.softplus(self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...])
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        o, state = delta_rule(q, k, v, g[..., None], beta, cache["state"], step)
        gate = jax.nn.silu(local_heads(self.in_proj_z(x), c.value_dim).astype(jnp.float32))
        y = self.out_proj((self.norm(o) * gate).astype(x.dtype).reshape(x.shape[0], -1))
        return self.shards.sum_if(self.cut, y), {"conv": carried, "state": state}

    def _key_head_of(self, heads: int) -> Array:
        """The local key head of each local value head."""
        value_heads = jnp.arange(heads)
        if self.cut and not self.cuts_keys:
            value_heads = value_heads + self.shards.rank() * heads
        return value_heads // (self.config.value_heads // self.config.key_heads)
