"""Mixtures of experts: the sigmoid router of DeepSeek-V3 and GLM-5, the softmax router of Qwen3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from serving.models.config import field, positive
from serving.models.grouped_matmul import grouped_matmul
from serving.models.layers import SwiGLU, gated
from serving.models.shards import Shards
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import Linear, RowsOf, param
from vitstripe.platform import Platform

SIGMOID, SOFTMAX = "sigmoid", "softmax"


@dataclass(frozen=True)
class MoEConfig:
    """One mixture of experts.

    experts E, chosen k, width I: the routed experts. shared_width: of the expert that every token takes, 0 for none.
    scoring: "sigmoid" (a bias `e_score_correction_bias` takes part in the choice, groups may limit it, the shared
    expert is added as it is) or "softmax" (no bias, no groups, the shared expert times a sigmoid gate of its own).
    normalise: the chosen weights are divided by their sum. scale: and multiplied by this. limit: see `gated`.
    """

    hidden_size: int
    experts: int
    chosen: int
    width: int
    shared_width: int
    scoring: str = SIGMOID
    groups: int = 1
    top_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    limit: float | None = None

    def __post_init__(self):
        def need(right: bool, text: str) -> None:
            if not right:
                raise CheckpointError(f"config.json: {text}")

        need(self.chosen <= self.experts, f"{self.chosen} experts a token, but there are only {self.experts}")
        need(self.experts % self.groups == 0, f"{self.experts} experts do not divide into n_group = {self.groups}")
        need(self.top_groups <= self.groups, f"topk_group = {self.top_groups} exceeds n_group = {self.groups}")
        if self.groups > 1:
            each = self.experts // self.groups
            held = self.top_groups * each
            need(each > 1, f"n_group = {self.groups} leaves one expert a group; a group is ranked by its two best")
            need(self.chosen <= held, f"{self.chosen} experts a token, but topk_group = {self.top_groups} hold {held}")
        need(self.limit is None or self.limit > 0, f"swiglu_limit is {self.limit}; it must be positive")

    @staticmethod
    def sigmoid(c: Mapping[str, Any]) -> "MoEConfig":
        """Reads the fields of DeepSeek-V3's kind. Raises CheckpointError naming the field."""
        width = positive(c, "moe_intermediate_size")
        return MoEConfig(
            hidden_size=positive(c, "hidden_size"),
            experts=positive(c, "n_routed_experts"),
            chosen=positive(c, "num_experts_per_tok"),
            width=width,
            shared_width=width * positive(c, "n_shared_experts", 1),
            groups=positive(c, "n_group", 1),
            top_groups=positive(c, "topk_group", 1),
            normalise=field(c, "norm_topk_prob", bool, True),
            scale=float(field(c, "routed_scaling_factor", (int, float), 1.0)),
            limit=swiglu_limit(c),
        )

    @staticmethod
    def softmax(c: Mapping[str, Any]) -> "MoEConfig":
        """Reads the fields of Qwen's kind; without shared_expert_intermediate_size there is no shared expert. Raises
        CheckpointError naming the field."""
        return MoEConfig(
            hidden_size=positive(c, "hidden_size"),
            experts=positive(c, "num_experts", c.get("num_local_experts")),
            chosen=positive(c, "num_experts_per_tok"),
            width=positive(c, "moe_intermediate_size"),
            shared_width=field(c, "shared_expert_intermediate_size", int, 0),
            scoring=SOFTMAX,
            normalise=field(c, "norm_topk_prob", bool, True),
        )


def swiglu_limit(c: Mapping[str, Any]) -> float | None:
    """The clamp of `gated`, None where config.json names none."""
    return None if c.get("swiglu_limit") is None else float(field(c, "swiglu_limit", (int, float)))


class _Stack(nnx.Module):
    """One weight of all experts, [E, out, in]."""

    def __init__(self, shape: tuple[int, int, int], *, dtype, tp_axis: int | None, rows_of: RowsOf):
        self.weight = param(shape, dtype, tp_axis=tp_axis, stacked=True, rows_of=rows_of)


class Experts(nnx.Module):
    """E SwiGLU experts of inner width I, dealt over the devices or with their width cut, whatever `shards` says.

    The file holds them one by one, or all in `experts.gate_up_proj` [E, 2I, D] (gate rows first) and
    `experts.down_proj` [E, D, I].
    """

    def __init__(self, c: MoEConfig, *, dtype, shards: Shards):
        out, into = (0, 0) if shards.experts else (1, 2) if shards.mlp else (None, None)
        up, down = (c.experts, c.width, c.hidden_size), (c.experts, c.hidden_size, c.width)
        first, second = (RowsOf("gate_up_proj", start, 2 * c.width) for start in (0, c.width))
        self.gate_proj = _Stack(up, dtype=dtype, tp_axis=out, rows_of=first)
        self.up_proj = _Stack(up, dtype=dtype, tp_axis=out, rows_of=second)
        self.down_proj = _Stack(down, dtype=dtype, tp_axis=into, rows_of=RowsOf("down_proj", 0, c.hidden_size))
        self.config, self.shards = c, shards

    def __call__(
        self,
        x: Float[Array, "T D"],
        ids: Int[Array, "T k"],
        weights: Float32[Array, "T k"],
        real: Bool[Array, " T"] | None = None,
        platform: Platform | None = None,
    ) -> Float32[Array, "T D"]:
        """This device's part of sum_j weights[t, j] * expert_{ids[t, j]}(x[t]), zero for rows that are not `real`.

        (token, choice) pairs are sorted by expert and multiplied in groups. Pairs of another device's experts and of
        padding come last and belong to no group.
        """
        rows, chosen = ids.shape
        own = self.gate_proj.weight.shape[0]
        local = ids - self.shards.rank() * own if self.shards.experts else ids
        mine = (local >= 0) & (local < own)
        if real is not None:
            mine &= real[:, None]
        group = jnp.where(mine, local, own).reshape(-1)
        order = jnp.argsort(group, stable=True)
        sizes = jnp.bincount(group, length=own).astype(jnp.int32)

        def grouped(a, stack, taken):
            return grouped_matmul(a, stack.weight[...], sizes, taken, spread=self.config.experts, platform=platform)

        token, place = order // chosen, jnp.arange(order.shape[0])
        inner = gated(grouped(x, self.gate_proj, token), grouped(x, self.up_proj, token), self.config.limit)
        y = grouped(inner, self.down_proj, place)
        # Each pair of this device is fetched from where it was sorted to. Selected, not multiplied by zero: what a
        # grouped product leaves in places of no group may be a NaN.
        place_of = jnp.zeros_like(order).at[order].set(place, unique_indices=True).reshape(rows, chosen)
        picked = y[jnp.where(mine, place_of, 0)].astype(jnp.float32) * weights[:, :, None]
        return jnp.where(mine[:, :, None], picked, 0).sum(1)


class Router(nnx.Module):
    """Router weights [E, D] in float32 and, for a sigmoid router, the bias that only chooses."""

    def __init__(self, c: MoEConfig):
        self.weight = param((c.experts, c.hidden_size), jnp.float32)
        self.e_score_correction_bias = param((c.experts,), jnp.float32) if c.scoring == SIGMOID else None

    def __call__(self, x: Float[Array, "T D"]) -> Float32[Array, "T E"]:
        """Logits, the same on every device."""
        dims = (((1,), (1,)), ((), ()))
        # HIGHEST, because the default of some GPUs multiplies float32 in a shorter format, which changes choices.
        return lax.dot_general(x.astype(jnp.float32), self.weight[...], dims, precision=lax.Precision.HIGHEST)


def route(
    scores: Float[Array, "T E"],
    bias: Float[Array, " E"] | None,
    *,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Expert ids and weights. scores: sigmoid or softmax of the router's logits. The bias decides who is chosen, never
    how much it counts; with groups > 1 only experts of the top_groups groups (by the sum of their two best) compete.
    Ties go to the lower id."""
    choice = scores if bias is None else scores + bias
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
    """Routed experts plus the expert that every token takes; the caller sums over devices where `cut`."""

    def __init__(self, c: MoEConfig, *, dtype, shards: Shards):
        self.gate = Router(c)
        self.experts = Experts(c, dtype=dtype, shards=shards)
        shared = None
        if c.shared_width:
            shared = SwiGLU(c.hidden_size, c.shared_width, dtype=dtype, shards=shards, limit=c.limit)
        self.shared_experts = shared if c.scoring == SIGMOID else None
        self.shared_expert = shared if c.scoring == SOFTMAX else None
        self.shared_expert_gate = Linear(c.hidden_size, 1, dtype=jnp.float32) if self.shared_expert else None
        self.config, self.shards, self.cut = c, shards, shards.mixture

    @jax.named_scope("mlp")
    def __call__(
        self, x: Float[Array, "T D"], real: Bool[Array, " T"] | None = None, platform: Platform | None = None
    ) -> Float[Array, "T D"]:
        """real: the rows that are tokens; others take no expert. platform: what it is compiled for, None for the first
        device."""
        c, logits = self.config, self.gate(x)
        ids, weights = route(
            jax.nn.sigmoid(logits) if c.scoring == SIGMOID else jax.nn.softmax(logits, -1),
            None if self.gate.e_score_correction_bias is None else self.gate.e_score_correction_bias[...],
            top_k=c.chosen,
            groups=c.groups,
            top_groups=c.top_groups,
            normalise=c.normalise,
            scale=c.scale,
        )
        y = self.experts(x, ids, weights, real, platform)
        shared = self._shared(x)
        return (y if shared is None else y + shared).astype(x.dtype)

    def _shared(self, x: Float[Array, "T D"]) -> Float32[Array, "T D"] | None:
        expert = self.shared_experts or self.shared_expert
        if expert is None:
            return None
        y = expert(x).astype(jnp.float32)
        if self.shared_expert_gate is not None:
            y = y * jax.nn.sigmoid(self.shared_expert_gate(x.astype(jnp.float32)))
        if self.cut and not expert.cut:
            # Every device has the whole of it: one gives it to the sum.
            y = jnp.where(self.shards.rank() == 0, y, 0)
        return y
