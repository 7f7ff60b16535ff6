"""Grouped-query attention over a paged cache of keys and values, and the decoder of the families that have nothing
else: Qwen3-VL, Qwen2.5-VL, GLM-4V and GLM-OCR differ in what `GqaConfig` says."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsa_indexer import inverse_frequencies
from serving.models.config import field, positive, refuse, rope_settings, text_config
from serving.models.decoder import CacheArray, Family, Selection
from serving.models.layers import Embedding, SwiGLU, mrope_tables, store_rows
from serving.models.moe import MoE, MoEConfig
from serving.models.paged_attention import paged_attention
from serving.models.shards import Shards, local_heads
from serving.models.step import Step
from serving.models.trunk import Trunk, names_beside_a_tower
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import Linear, RMSNorm, rotate_half, rotate_pairs, traced_once
from vitstripe.platform import Platform


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention of num_heads queries over num_kv_heads keys, each head_dim wide.

    bias: q, k and v have one (o never has). pairs: rotate pairs (2j, 2j + 1), else (j, j + r / 2), of the first r
    columns of a head, twice as many as there are angles; the rest passes. gated: q_proj holds, head by head, the query
    and then a gate, and the output is multiplied by the sigmoid of that.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    pairs: bool = False
    gated: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.num_heads} query heads are no multiple of {self.num_kv_heads} key heads"
            )


class GroupedQueryAttention(nnx.Module):
    """Key and value rows are cached after norm and rotation. norm: makes q_norm and k_norm, over a head."""

    def __init__(
        self,
        c: AttentionConfig,
        *,
        dtype,
        shards: Shards,
        norm: Callable[[int], nnx.Module] | None = None,
    ):
        out = "out" if shards.heads else None
        kv_out = "out" if shards.kv else None
        q_width, kv_width = c.num_heads * c.head_dim * (1 + c.gated), c.num_kv_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, q_width, dtype=dtype, bias=c.bias, tp=out)
        self.k_proj = Linear(c.hidden_size, kv_width, dtype=dtype, bias=c.bias, tp=kv_out)
        self.v_proj = Linear(c.hidden_size, kv_width, dtype=dtype, bias=c.bias, tp=kv_out)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, dtype=dtype, tp="in" if shards.heads else None)
        self.q_norm = None if norm is None else norm(c.head_dim)
        self.k_norm = None if norm is None else norm(c.head_dim)
        self.config, self.shards = c, shards

    def caches(self) -> dict[str, CacheArray]:
        """What the layer keeps: a key and a value row a token."""
        row = CacheArray((self.config.num_kv_heads, self.config.head_dim), cut=0 if self.shards.kv else None)
        return {"k": row, "v": row}

    @jax.named_scope("mixer")
    def __call__(self, x: Float[Array, "T D"], cos, sin, cache, step: Step, platform: Platform | None):
        """(y [T, D], the layer's cache). cos, sin: float32 [T, r / 2], the angles of each row."""
        c = self.config
        q, gate = local_heads(self.q_proj(x), c.head_dim * (1 + c.gated)), None
        if c.gated:
            q, gate = q[..., : c.head_dim], q[..., c.head_dim :]
        k, v = local_heads(self.k_proj(x), c.head_dim), local_heads(self.v_proj(x), c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        cache = {**cache, "k": store_rows(cache["k"], k, step.slots), "v": store_rows(cache["v"], v, step.slots)}
        y = paged_attention(
            q,
            cache["k"],
            cache["v"],
            step.lengths,
            step.tile_request,
            step.page_table,
            scale=c.head_dim**-0.5,
            kv_heads=self._kv_heads(q.shape[1]),
            platform=platform,
        )
        if gate is not None:
            y = (y.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
        return self.shards.sum_if(self.shards.heads, self.o_proj(y.reshape(x.shape[0], -1))), cache

    def _rotate(self, x: Float[Array, "T H D"], cos: Array, sin: Array) -> Float[Array, "T H D"]:
        r = 2 * cos.shape[-1]
        turned = (rotate_pairs if self.config.pairs else rotate_half)(x[..., :r], cos[:, None], sin[:, None])
        return turned if r == x.shape[-1] else jnp.concatenate([turned, x[..., r:]], -1)

    def _kv_heads(self, local: int) -> Int[Array, " R"] | None:
        """Where queries are cut and keys are not: the key head of each run of local query heads that share one."""
        if not self.shards.heads or self.shards.kv:
            return None
        group = self.config.num_heads // self.config.num_kv_heads
        run = math.gcd(local, group)
        return (self.shards.rank() * local + jnp.arange(0, local, run)) // group


@dataclass(frozen=True)
class GqaConfig:
    """A decoder of grouped-query attention layers.

    rotary_dim: columns of a head that are rotated. mrope_section: how many of their angles belong to each of the axes
    t, h, w; contiguous: one axis after another, else interleaved. qk_norm: q_norm and k_norm. four_norms: also the
    outputs of attention and MLP are normalised. sparse_mlp: whether each layer's MLP is the mixture `moe`.
    """

    attention: AttentionConfig
    intermediate_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    contiguous: bool
    tied: bool
    qk_norm: bool = False
    four_norms: bool = False
    num_deepstack: int = 0
    sparse_mlp: tuple[bool, ...] = ()
    moe: MoEConfig | None = None

    @property
    def hidden_size(self) -> int:
        return self.attention.hidden_size

    @staticmethod
    def from_hf(
        config: Mapping[str, Any],
        *,
        contiguous: bool,
        bias: bool = False,
        pairs: bool = False,
        eps: float = 1e-6,
        partial: float = 1.0,
        **family: Any,
    ) -> "GqaConfig":
        """Reads the fields that all families share, from text_config or from the top where there is none. eps,
        partial: rms_norm_eps and partial_rotary_factor where config.json has none. family: what of GqaConfig the family
        decides. Raises CheckpointError naming the field."""
        c = text_config(config)
        refuse(c, "hidden_act", ("silu",))
        theta, rope = rope_settings(c)
        hidden, heads = positive(c, "hidden_size"), positive(c, "num_attention_heads")
        head_dim = positive(c, "head_dim", hidden // heads)
        partial = field(rope, "partial_rotary_factor", (int, float), c.get("partial_rotary_factor") or partial)
        rotary = int(head_dim * partial)
        if not 0 < rotary <= head_dim or rotary % 2:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {partial} rotates {rotary} of {head_dim} columns of a head; that "
                "must be an even number, from 2 to all of them"
            )
        sections = tuple(rope.get("mrope_section") or ())
        if len(sections) != 3 or sum(sections) != rotary // 2:
            raise CheckpointError(
                f"config.json: mrope_section {list(sections)} must be three numbers that sum to {rotary // 2}, half of "
                f"the {rotary} columns of a head that are rotated"
            )
        return GqaConfig(
            attention=AttentionConfig(
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=positive(c, "num_key_value_heads", heads),
                head_dim=head_dim,
                bias=bias,
                pairs=pairs,
            ),
            intermediate_size=positive(c, "intermediate_size"),
            num_layers=positive(c, "num_hidden_layers"),
            vocab_size=positive(c, "vocab_size"),
            rms_norm_eps=float(field(c, "rms_norm_eps", (int, float), eps)),
            rope_theta=theta,
            rotary_dim=rotary,
            mrope_section=sections,
            contiguous=contiguous,
            tied=bool(config.get("tie_word_embeddings", c.get("tie_word_embeddings", False))),
            **family,
        )


class Layer(nnx.Module):
    """post_attention_layernorm comes before the MLP, in the layers with four norms too."""

    def __init__(self, c: GqaConfig, *, dtype, shards: Shards, sparse: bool):
        def norm(features: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(features, eps=c.rms_norm_eps)

        self.input_layernorm = norm()
        self.self_attn = GroupedQueryAttention(
            c.attention, dtype=dtype, shards=shards, norm=norm if c.qk_norm else None
        )
        self.post_self_attn_layernorm = norm() if c.four_norms else None
        self.post_attention_layernorm = norm()
        self.mlp = _mlp(c, dtype=dtype, shards=shards, sparse=sparse)
        self.post_mlp_layernorm = norm() if c.four_norms else None
        self.shards = shards

    def __call__(self, h, cache, cos, sin, step, platform):
        y, cache = self.self_attn(self.input_layernorm(h), cos, sin, cache, step, platform)
        h = h + (y if self.post_self_attn_layernorm is None else self.post_self_attn_layernorm(y))
        y = self.mlp(self.post_attention_layernorm(h), step.lengths > 0, platform)
        y = self.shards.sum_mlp(self.mlp.cut, y)
        return h + (y if self.post_mlp_layernorm is None else self.post_mlp_layernorm(y)), cache


def _mlp(c: GqaConfig, *, dtype, shards: Shards, sparse: bool) -> SwiGLU | MoE:
    if sparse:
        assert c.moe is not None
        return MoE(c.moe, dtype=dtype, shards=shards)
    return SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, shards=shards)


class Model(nnx.Module):
    def __init__(self, c: GqaConfig, *, dtype, shards: Shards):
        sparse = c.sparse_mlp or (False,) * c.num_layers
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype=dtype, shards=shards)
        self.layers = nnx.List([Layer(c, dtype=dtype, shards=shards, sparse=s) for s in sparse])
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class GqaDecoder(Trunk):
    """See serving.models.decoder.Decoder."""

    def __init__(self, c: GqaConfig, *, dtype, tp: int):
        # Of a mixture in every layer the dense width is not used.
        dense = () if all(c.sparse_mlp) and c.sparse_mlp else (c.intermediate_size,)
        shared = () if c.moe is None or not c.moe.shared_width else (c.moe.shared_width,)
        shards = Shards.of(
            tp,
            heads=c.attention.num_heads,
            kv_heads=c.attention.num_kv_heads,
            widths=(*dense, *shared),
            vocab=c.vocab_size,
            experts=0 if c.moe is None else c.moe.experts,
            expert_width=0 if c.moe is None else c.moe.width,
        )
        super().__init__(Model(c, dtype=dtype, shards=shards), c, dtype=dtype, shards=shards)
        self.num_deepstack = c.num_deepstack

    def forward(self, hidden, deepstack, caches, step: Step, selection: Selection):
        c = self.config
        frequencies = inverse_frequencies(c.rotary_dim, c.rope_theta)
        cos, sin = mrope_tables(step.positions, frequencies, c.mrope_section, contiguous=c.contiguous)
        h, new_caches, run = hidden, [], traced_once(cos, sin, step, selection.platform)
        for i, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            h, cache = run(layer, h, cache)
            new_caches.append(cache)
            # Deepstack level i is added after decoder layer i; its rows are zero off the image tokens.
            if deepstack is not None and i < deepstack.shape[0]:
                h = h + deepstack[i]
        return h, new_caches, []


def family(read: Callable[[Mapping[str, Any]], GqaConfig]) -> Family:
    """The family whose config.json `read` reads: a decoder beside a tower under `visual.`, with M-RoPE."""
    return Family(
        build=lambda config, tp, dtype: GqaDecoder(read(config), dtype=dtype, tp=tp),
        disk_names=names_beside_a_tower,
        owns=lambda tensor: "visual." not in tensor,
        ignore=lambda tensor: tensor.endswith("rotary_emb.inv_freq"),
        image_token=lambda config: config.get("image_token_id"),
        uses_mrope=True,
    )
