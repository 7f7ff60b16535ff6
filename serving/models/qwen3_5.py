"""The Qwen3.5 text decoder (Qwen3.5, 3.6, 3.8; dense and mixture of experts): gated delta nets and, at every fourth
layer, grouped-query attention with partial interleaved M-RoPE and a sigmoid gate on its output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from dsa_indexer import inverse_frequencies
from serving.models.config import field, positive, refuse, rope_settings, text_config
from serving.models.decoder import CacheArray, Family, Selection
from serving.models.gated_delta_net import DeltaNetConfig, GatedDeltaNet, why_not
from serving.models.gqa import AttentionConfig, GroupedQueryAttention
from serving.models.layers import Embedding, SwiGLU, mrope_tables
from serving.models.moe import MoE, MoEConfig
from serving.models.shards import Shards
from serving.models.step import Step
from serving.models.trunk import Trunk, names_beside_a_tower
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import param, traced_once

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Qwen35Config:
    """The fields of text_config that the decoder uses. rotary_dim: leading columns of a head that are rotated.
    intermediate_size: 0 where every MLP is the mixture `moe`."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    attention: AttentionConfig
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    vocab_size: int
    rms_norm_eps: float
    tied: bool
    delta_net: DeltaNetConfig
    moe: MoEConfig | None

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "Qwen35Config":
        """Reads a Qwen3.5 config.json, or one of its text model alone. Raises CheckpointError naming the field."""
        c = text_config(config)
        refuse(c, "hidden_act", ("silu",))
        refuse(c, "attention_bias", (False,))
        layers = positive(c, "num_hidden_layers")
        hidden, head_dim = positive(c, "hidden_size"), positive(c, "head_dim", 256)
        theta, rope = rope_settings(c)
        share = field(rope, "partial_rotary_factor", (int, float), c.get("partial_rotary_factor", 0.25))
        rotary_dim, sections = int(head_dim * share), tuple(rope.get("mrope_section", (11, 11, 10)))
        if len(sections) != 3 or 2 * sum(sections) != rotary_dim:
            raise CheckpointError(
                f"config.json: mrope_section {list(sections)} must be three numbers that sum to half of the "
                f"{rotary_dim} rotated columns of a head (head_dim {head_dim} * partial_rotary_factor {share})"
            )
        eps = float(field(c, "rms_norm_eps", (int, float), 1e-6))
        moe = MoEConfig.softmax(c) if c.get("num_experts") else None
        return Qwen35Config(
            hidden_size=hidden,
            intermediate_size=0 if moe else positive(c, "intermediate_size"),
            layer_types=_layer_types(c, layers),
            attention=AttentionConfig(
                hidden_size=hidden,
                num_heads=positive(c, "num_attention_heads"),
                num_kv_heads=positive(c, "num_key_value_heads"),
                head_dim=head_dim,
                gated=True,
            ),
            rotary_dim=rotary_dim,
            rope_theta=theta,
            mrope_section=sections,
            vocab_size=positive(c, "vocab_size"),
            rms_norm_eps=eps,
            tied=bool(config.get("tie_word_embeddings", c.get("tie_word_embeddings", False))),
            delta_net=DeltaNetConfig(
                hidden_size=hidden,
                key_heads=positive(c, "linear_num_key_heads"),
                value_heads=positive(c, "linear_num_value_heads"),
                key_dim=positive(c, "linear_key_head_dim"),
                value_dim=positive(c, "linear_value_head_dim"),
                taps=positive(c, "linear_conv_kernel_dim", 4),
                norm_eps=eps,
            ),
            moe=moe,
        )


def _layer_types(c: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    types = c.get("layer_types")
    if types is None:
        interval = positive(c, "full_attention_interval", 4)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))
    if len(types) < layers or not set(types) <= {LINEAR, FULL}:
        raise CheckpointError(f"config.json: layer_types must name {LINEAR!r} or {FULL!r} for {layers} layers")
    return tuple(types[:layers])


class OffsetRMSNorm(nnx.Module):
    """(1 + w) * x / sqrt(mean(x^2) + eps) over the last axis, float32 inside, in x's dtype."""

    def __init__(self, features: int, *, eps: float):
        self.weight = param((features,), jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        h = x.astype(jnp.float32)
        h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + self.eps)
        return (h * (1 + self.weight[...])).astype(x.dtype)


class Layer(nnx.Module):
    def __init__(self, c: Qwen35Config, kind: str, *, dtype, shards: Shards):
        def norm(features: int = c.hidden_size) -> OffsetRMSNorm:
            return OffsetRMSNorm(features, eps=c.rms_norm_eps)

        self.input_layernorm = norm()
        linear = GatedDeltaNet(c.delta_net, dtype=dtype, shards=shards) if kind == LINEAR else None
        full = None if linear else GroupedQueryAttention(c.attention, dtype=dtype, shards=shards, norm=norm)
        self.linear_attn, self.self_attn = linear, full
        self.post_attention_layernorm = norm()
        if c.moe is not None:
            self.mlp = MoE(c.moe, dtype=dtype, shards=shards)
        else:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, shards=shards)
        self.shards = shards

    def caches(self) -> dict[str, CacheArray]:
        mixer = self.linear_attn or self.self_attn
        assert mixer is not None
        return mixer.caches()

    def __call__(self, h, cache, cos, sin, step: Step, platform):
        x = self.input_layernorm(h)
        if self.linear_attn is not None:
            y, cache = self.linear_attn(x, cache, step)
        else:
            assert self.self_attn is not None
            y, cache = self.self_attn(x, cos, sin, cache, step, platform)
        h = h + y
        x = self.post_attention_layernorm(h)
        y = self.mlp(x, step.lengths > 0, platform)
        return h + self.shards.sum_mlp(self.mlp.cut, y), cache


class Model(nnx.Module):
    def __init__(self, c: Qwen35Config, *, dtype, shards: Shards):
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype=dtype, shards=shards)
        self.layers = nnx.List([Layer(c, kind, dtype=dtype, shards=shards) for kind in c.layer_types])
        self.norm = OffsetRMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class Qwen35Decoder(Trunk):
    """See serving.models.decoder.Decoder."""

    indexer = None

    def __init__(self, c: Qwen35Config, *, dtype, tp: int):
        shards = Shards.of(
            tp,
            heads=c.attention.num_heads,
            kv_heads=c.attention.num_kv_heads,
            widths=(c.intermediate_size,) if c.moe is None else (c.moe.shared_width,),
            vocab=c.vocab_size,
            experts=0 if c.moe is None else c.moe.experts,
            expert_width=0 if c.moe is None else c.moe.width,
        )
        super().__init__(Model(c, dtype=dtype, shards=shards), c, dtype=dtype, shards=shards)

    def caches(self) -> list[dict[str, CacheArray]]:
        return [layer.caches() for layer in self.model.layers]

    def forward(self, hidden, deepstack, caches, step: Step, selection: Selection):
        c = self.config
        cos, sin = mrope_tables(step.positions, inverse_frequencies(c.rotary_dim, c.rope_theta), c.mrope_section)
        run = traced_once(cos, sin, step, selection.platform)
        h, new_caches = hidden, []
        for layer, cache in zip(self.model.layers, caches, strict=True):
            h, cache = run(layer, h, cache)
            new_caches.append(cache)
        return h, new_caches, []

    def layer_sums(self) -> int:
        mixers = (self.shards.heads if x.linear_attn is None else x.linear_attn.cut for x in self.model.layers)
        return sum(map(int, mixers)) + sum(int(layer.mlp.cut) for layer in self.model.layers)


FAMILY = Family(
    build=lambda config, tp, dtype: Qwen35Decoder(Qwen35Config.from_hf(config), dtype=dtype, tp=tp),
    disk_names=names_beside_a_tower,
    owns=lambda tensor: "visual." not in tensor,
    ignore=lambda tensor: tensor.endswith("rotary_emb.inv_freq"),
    image_token=lambda config: config.get("image_token_id"),
    uses_mrope=True,
    why_not=why_not,
)
