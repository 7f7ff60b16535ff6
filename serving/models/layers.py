"""Decoder parts that several families share. Inside shard_map each device sees its own part of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from serving.models.shards import Shards
from serving.models.step import Step
from vitstripe.nn import Linear, RowsOf, param
from vitstripe.platform import Platform


class Embedding(nnx.Module):
    """Token embedding [V, D], cut by vocabulary rows."""

    def __init__(self, vocab: int, features: int, *, dtype, shards: Shards):
        self.weight = param((vocab, features), dtype, tp_axis=0 if shards.vocab else None)
        self.shards = shards

    @jax.named_scope("splice")
    def __call__(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        weight = self.weight[...]
        local = ids - self.shards.rank() * weight.shape[0] if self.shards.vocab else ids
        inside = (local >= 0) & (local < weight.shape[0])
        rows = weight[jnp.clip(local, 0, weight.shape[0] - 1)]
        return self.shards.sum_if(self.shards.vocab, jnp.where(inside[:, None], rows, 0))


@jax.named_scope("logits")
def logits_of(x: Float[Array, "R D"], head: Float[Array, "v D"], shards: Shards) -> Float[Array, "R V"]:
    """float32 logits over the whole vocabulary on every device; `head` is this device's rows of it."""
    dims = (((1,), (1,)), ((), ()))
    local = lax.dot_general(x, head, dims, preferred_element_type=jnp.float32)
    return lax.all_gather(local, shards.axis, axis=1, tiled=True) if shards.vocab else local


def gated(gate: Float[Array, "*B I"], up: Float[Array, "*B I"], limit: float | None = None) -> Float[Array, "*B I"]:
    """silu(gate) * up. limit: the gate is clamped to it from above only, `up` from both sides."""
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


class SwiGLU(nnx.Module):
    """down(gated(gate x, up x)), the inner width cut; the caller sums over devices where `cut`.

    The file may hold gate and up as one `gate_up_proj.weight` [2I, D], the gate's rows first. limit: see `gated`.
    """

    def __init__(self, features: int, width: int, *, dtype, shards: Shards, limit: float | None = None):
        out, into = ("out", "in") if shards.mlp else (None, None)
        gate, up = (RowsOf("gate_up_proj.weight", start, 2 * width) for start in (0, width))
        self.gate_proj = Linear(features, width, dtype=dtype, tp=out, rows_of=gate)
        self.up_proj = Linear(features, width, dtype=dtype, tp=out, rows_of=up)
        self.down_proj = Linear(width, features, dtype=dtype, tp=into)
        self.limit, self.cut = limit, shards.mlp

    @jax.named_scope("mlp")
    def __call__(
        self, x: Float[Array, "T D"], real: Bool[Array, " T"] | None = None, platform: Platform | None = None
    ) -> Float[Array, "T D"]:
        """real, platform: of no use here, but to the mixture that some layers have in the place of this."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.limit))


def store_rows(
    pages: Float[Array, "P S *F"], rows: Float[Array, "T *F"], slots: Int[Array, " T"]
) -> Float[Array, "P S *F"]:
    """Writes each row to its slot (page * S + offset); slots past the pool are dropped."""
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[slots].set(rows.astype(pages.dtype), mode="drop").reshape(pages.shape)


def states_of(states: Shaped[Array, "S *F"], step: Step) -> Shaped[Array, "R *F"]:
    """The state of each request of a pass before it, out of an array with one a seat; zero for a fresh request."""
    kept = states[jnp.minimum(step.seats, states.shape[0] - 1)]
    return jnp.where((step.starts > 0).reshape(-1, *[1] * (kept.ndim - 1)), kept, 0)


def store_states(states: Shaped[Array, "S *F"], new: Shaped[Array, "R *F"], step: Step) -> Shaped[Array, "S *F"]:
    """Writes the state of each request of a pass; what has no seat is dropped."""
    return states.at[step.seats].set(new.astype(states.dtype), mode="drop")


def mrope_axes(sections: tuple[int, int, int], *, contiguous: bool = False) -> np.ndarray:
    """The axis (0 t, 1 h, 2 w) each frequency turns by. Interleaved (Qwen3-VL): h at j % 3 == 1 and w at j % 3 == 2
    while j < 3 * that axis' section, t elsewhere. contiguous (Qwen2.5-VL, GLM-4V): one section after another."""
    if contiguous:
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    axes = np.zeros(sum(sections), np.int32)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


def mrope_tables(
    positions: Int[Array, "3 T"],
    frequencies: np.ndarray,
    sections: tuple[int, int, int],
    *,
    contiguous: bool = False,
) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """cos and sin of each frequency's angle at the position on its axis, float32."""
    angle = positions[jnp.asarray(mrope_axes(sections, contiguous=contiguous))].T.astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)
