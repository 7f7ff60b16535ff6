"""Mixture of experts with the sigmoid router of DeepSeek-V3 and GLM-5."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from serving.models.layers import SwiGLU
from serving.models.shards import Shards
from vitstripe.nn import linear, param


class _Stack(nnx.Module):
    """One weight of all experts, [E, out, in]."""

    def __init__(self, shape: tuple[int, int, int], *, dtype, tp_axis: int | None):
        self.weight = param(shape, dtype, tp_axis=tp_axis, stacked=True)


class Experts(nnx.Module):
    """E SwiGLU experts of inner width I, the width cut over the mesh."""

    def __init__(self, experts: int, features: int, width: int, *, dtype, shards: Shards):
        out, into = (1, 2) if shards.mlp else (None, None)
        self.gate_proj = _Stack((experts, width, features), dtype=dtype, tp_axis=out)
        self.up_proj = _Stack((experts, width, features), dtype=dtype, tp_axis=out)
        self.down_proj = _Stack((experts, features, width), dtype=dtype, tp_axis=into)

    def __call__(
        self, x: Float[Array, "T D"], ids: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """sum_j weights[t, j] * expert_{ids[t, j]}(x[t]). Rows are sorted by expert and multiplied in groups."""
        rows, chosen = ids.shape
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=self.gate_proj.weight.shape[0]).astype(jnp.int32)

        def grouped(a, stack):
            b = jnp.swapaxes(stack.weight[...], 1, 2)
            return lax.ragged_dot(a, b, sizes, preferred_element_type=jnp.float32).astype(x.dtype)

        inputs = x[order // chosen]
        y = grouped(jax.nn.silu(grouped(inputs, self.gate_proj)) * grouped(inputs, self.up_proj), self.down_proj)
        y = y.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        back = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
        return back.reshape(rows, chosen, -1).sum(1).astype(x.dtype)


class Router(nnx.Module):
    """Router weights, float32: weight [E, D] and the bias that only chooses."""

    def __init__(self, experts: int, features: int):
        self.weight = param((experts, features), jnp.float32)
        self.e_score_correction_bias = param((experts,), jnp.float32)


def route(
    scores: Float[Array, "T E"],
    bias: Float[Array, " E"],
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Expert ids and weights. scores: sigmoid(router). The bias decides who is chosen, never how much it counts; with
    groups > 1 only experts of the top_groups groups (by the sum of their two best) compete. Ties go to the lower id."""
    choice = scores + bias
    if groups > 1:
        by_group = choice.reshape(choice.shape[0], groups, -1)
        best_two = lax.top_k(by_group, 2)[0].sum(-1)
        kept = lax.top_k(best_two, top_groups)[1]
        allowed = (kept[:, :, None] == jnp.arange(groups)).any(1)
        choice = jnp.where(allowed[:, :, None], by_group, -jnp.inf).reshape(choice.shape)
    ids = lax.top_k(choice, top_k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * scale


class MoE(nnx.Module):
    """Routed experts plus a shared expert that every token takes, unscaled; the caller sums over devices."""

    def __init__(self, config, *, dtype, shards: Shards):
        self.gate = Router(config.num_experts, config.hidden_size)
        self.experts = Experts(
            config.num_experts, config.hidden_size, config.moe_intermediate_size, dtype=dtype, shards=shards
        )
        self.shared_experts = SwiGLU(config.hidden_size, config.shared_width, dtype=dtype, shards=shards)
        self.config = config

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        c = self.config
        scores = jax.nn.sigmoid(linear(x.astype(jnp.float32), self.gate.weight[...]))
        ids, weights = route(
            scores,
            self.gate.e_score_correction_bias[...],
            top_k=c.experts_per_token,
            groups=c.expert_groups,
            top_groups=c.expert_top_groups,
            normalise=c.normalise_router,
            scale=c.router_scale,
        )
        return self.experts(x, ids, weights) + self.shared_experts(x)
