"""Decoder parts that several families share. Inside shard_map each device sees its own part of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from serving.models.shards import Shards
from vitstripe.nn import Linear, param


class Embedding(nnx.Module):
    """Token embedding [V, D], cut by vocabulary rows."""

    def __init__(self, vocab: int, features: int, *, dtype, shards: Shards):
        self.weight = param((vocab, features), dtype, tp_axis=0 if shards.vocab else None)
        self.shards = shards

    def __call__(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        weight = self.weight[...]
        local = ids - self.shards.rank() * weight.shape[0] if self.shards.vocab else ids
        inside = (local >= 0) & (local < weight.shape[0])
        rows = weight[jnp.clip(local, 0, weight.shape[0] - 1)]
        return self.shards.sum_if(self.shards.vocab, jnp.where(inside[:, None], rows, 0))


def logits_of(x: Float[Array, "R D"], head: Float[Array, "v D"], shards: Shards) -> Float[Array, "R V"]:
    """float32 logits over the whole vocabulary on every device; `head` is this device's rows of it."""
    dims = (((1,), (1,)), ((), ()))
    local = lax.dot_general(x, head, dims, preferred_element_type=jnp.float32)
    return lax.all_gather(local, shards.axis, axis=1, tiled=True) if shards.vocab else local


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x), the inner width cut; the caller sums over devices."""

    def __init__(self, features: int, width: int, *, dtype, shards: Shards):
        out, into = ("out", "in") if shards.mlp else (None, None)
        self.gate_proj = Linear(features, width, dtype=dtype, tp=out)
        self.up_proj = Linear(features, width, dtype=dtype, tp=out)
        self.down_proj = Linear(width, features, dtype=dtype, tp=into)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def store_rows(
    pages: Float[Array, "P S *F"], rows: Float[Array, "T *F"], slots: Int[Array, " T"]
) -> Float[Array, "P S *F"]:
    """Writes each row to its slot (page * S + offset); slots past the pool are dropped."""
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[slots].set(rows.astype(pages.dtype), mode="drop").reshape(pages.shape)


def mrope_axes(sections: tuple[int, int, int]) -> np.ndarray:
    """The axis (0 t, 1 h, 2 w) each frequency turns by in interleaved M-RoPE (Qwen3-VL): h at j % 3 == 1 and w at
    j % 3 == 2 while j < 3 * that axis' section, t elsewhere."""
    axes = np.zeros(sum(sections), np.int32)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


def mrope_tables(
    positions: Int[Array, "3 T"], frequencies: np.ndarray, sections: tuple[int, int, int]
) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """cos and sin of each frequency's angle at the position on its axis, float32."""
    angle = positions[jnp.asarray(mrope_axes(sections))].T.astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)
