"""The GLM-MoE-DSA decoder (GLM-5): multi-head latent attention over the keys an indexer selects, and a
mixture of experts. Absorbed form throughout: a query is carried into the latent space and attends to the one cached
latent row a token, so the cache is the same on every device and heads are cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsa_indexer import (
    Indexer,
    IndexerConfig,
    RowBatch,
    StripeConfig,
    gather_keys,
    inverse_frequencies,
    rope_tables,
    sparse_mla,
    store_keys,
    striped_topk_rows_local,
    to_paged,
    topk_paged,
    topk_rows,
)
from serving.models.config import field, positive, refuse, rope_settings
from serving.models.decoder import CacheArray, Family, Selection
from serving.models.layers import Embedding, SwiGLU, logits_of, store_rows
from serving.models.moe import MoE
from serving.models.shards import Shards, local_heads
from serving.models.step import Step
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import Linear, RMSNorm, rotate_pairs, traced_once


@dataclass(frozen=True)
class GlmMoeDsaConfig:
    """The fields of config.json that the decoder uses."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    vocab_size: int
    rms_norm_eps: float
    latent_norm_eps: float
    rope_theta: float
    sparse_mlp: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_width: int
    expert_groups: int
    expert_top_groups: int
    normalise_router: bool
    router_scale: float
    tied: bool
    indexer: IndexerConfig

    @staticmethod
    def from_hf(c: Mapping[str, Any]) -> "GlmMoeDsaConfig":
        """Reads a GLM-MoE-DSA config.json. Raises CheckpointError naming the field.

        latent_norm_eps, the eps of q_a_layernorm and kv_a_layernorm, is no field of published configurations.
        transformers uses 1e-6 there whatever rms_norm_eps says, the serving engines use rms_norm_eps, and so do we
        unless config.json has the field.
        """
        refuse(c, "hidden_act", ("silu",))
        refuse(c, "attention_bias", (False,))
        layers = positive(c, "num_hidden_layers")
        types = c.get("mlp_layer_types")
        if types is None:
            dense = field(c, "first_k_dense_replace", int, 3)
            types = ["dense" if i < dense else "sparse" for i in range(layers)]
        if len(types) < layers or not set(types) <= {"dense", "sparse"}:
            raise CheckpointError(f"config.json: mlp_layer_types must name 'dense' or 'sparse' for {layers} layers")
        eps = float(field(c, "rms_norm_eps", (int, float), 1e-5))
        expert_width = positive(c, "moe_intermediate_size")
        try:
            indexer = IndexerConfig.from_hf(c)
        except ValueError as error:
            raise CheckpointError(f"config.json: {error}") from error
        return GlmMoeDsaConfig(
            hidden_size=positive(c, "hidden_size"),
            intermediate_size=positive(c, "intermediate_size"),
            num_layers=layers,
            num_heads=positive(c, "num_attention_heads"),
            q_lora_rank=positive(c, "q_lora_rank"),
            kv_lora_rank=positive(c, "kv_lora_rank"),
            nope_dim=positive(c, "qk_nope_head_dim"),
            rope_dim=positive(c, "qk_rope_head_dim"),
            value_dim=positive(c, "v_head_dim"),
            vocab_size=positive(c, "vocab_size"),
            rms_norm_eps=eps,
            latent_norm_eps=float(field(c, "latent_norm_eps", (int, float), eps)),
            rope_theta=rope_settings(c)[0],
            sparse_mlp=tuple(t == "sparse" for t in types[:layers]),
            num_experts=positive(c, "n_routed_experts"),
            experts_per_token=positive(c, "num_experts_per_tok"),
            moe_intermediate_size=expert_width,
            shared_width=expert_width * positive(c, "n_shared_experts", 1),
            expert_groups=positive(c, "n_group", 1),
            expert_top_groups=positive(c, "topk_group", 1),
            normalise_router=field(c, "norm_topk_prob", bool, True),
            router_scale=float(field(c, "routed_scaling_factor", (int, float), 1.0)),
            tied=bool(c.get("tie_word_embeddings", False)),
            indexer=indexer,
        )


class LatentAttention(nnx.Module):
    """Sparse latent attention of one layer. A "full" layer owns an indexer; a "shared" one takes the selection of the
    last full layer before it."""

    def __init__(self, c: GlmMoeDsaConfig, *, dtype, shards: Shards, full: bool):
        out, into = ("out", "in") if shards.heads else (None, None)
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, dtype=dtype)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, eps=c.latent_norm_eps)
        self.q_b_proj = Linear(c.q_lora_rank, c.num_heads * (c.nope_dim + c.rope_dim), dtype=dtype, tp=out)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.rope_dim, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, eps=c.latent_norm_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_heads * (c.nope_dim + c.value_dim), dtype=dtype, tp=out)
        self.o_proj = Linear(c.num_heads * c.value_dim, c.hidden_size, dtype=dtype, tp=into)
        self.indexer = Indexer(c.indexer, dtype=dtype) if full else None
        self.config, self.shards = c, shards

    def __call__(self, x: Float[Array, "T D"], cos, sin, cache, step: Step, selection: Selection, selected):
        c, rank = self.config, self.config.kv_lora_rank
        q_lora = self.q_a_layernorm(self.q_a_proj(x))
        q = local_heads(self.q_b_proj(q_lora), c.nope_dim + c.rope_dim)
        q_rope = rotate_pairs(q[..., c.nope_dim :], cos[:, None], sin[:, None])
        kv = self.kv_a_proj_with_mqa(x)
        row = jnp.concatenate([self.kv_a_layernorm(kv[:, :rank]), rotate_pairs(kv[:, rank:], cos, sin)], -1)
        cache = {**cache, "latent": store_rows(cache["latent"], row, step.slots)}
        if self.indexer is not None:
            keys = self.indexer.keys(x, cos, sin)
            cache["index"] = store_keys(cache["index"], keys, step.slots)
            selected = self._select(x, q_lora, cos, sin, cache["index"], step, selection)
        up = self.kv_b_proj.weight[...].reshape(-1, c.nope_dim + c.value_dim, rank)
        q_latent = jnp.einsum(
            "thn,hnr->thr", q[..., : c.nope_dim], up[:, : c.nope_dim], preferred_element_type=jnp.float32
        )
        request = jnp.repeat(step.tile_request, step.tile)
        y = sparse_mla(
            jnp.concatenate([q_latent.astype(q.dtype), q_rope], -1),
            cache["latent"].reshape(-1, rank + c.rope_dim),
            to_paged(selected, request, step.page_table, cache["latent"].shape[1]),
            scale=(c.nope_dim + c.rope_dim) ** -0.5,
            value_dim=rank,
            platform=selection.platform,
        )
        y = jnp.einsum("thr,hvr->thv", y, up[:, c.nope_dim :], preferred_element_type=jnp.float32).astype(x.dtype)
        return self.shards.sum_if(self.shards.heads, self.o_proj(y.reshape(x.shape[0], -1))), cache, selected

    def _select(self, x, q_lora, cos, sin, index_pages, step: Step, selection: Selection) -> Int[Array, "T K"]:
        """Positions of the keys each row attends to, relative to its request, ascending, -1 padded."""
        assert self.indexer is not None
        k, forced = self.config.indexer.topk, self.config.indexer.forced
        q, gates = self.indexer.queries(x, q_lora, cos, sin)
        if step.tile == 1:
            table = step.page_table[step.tile_request]
            one_each = (q[:, None], gates[:, None], index_pages, table, step.lengths[:, None])
            return topk_paged(*one_each, k=k, forced=forced, platform=selection.platform)[:, 0]
        keys = gather_keys(index_pages, step.key_pages)
        rows = RowBatch(ks=step.key_starts, lengths=step.lengths, request=None)
        if selection.stripe_rows is None:
            return topk_rows(q, gates, keys, None, rows, k=k, forced=forced, platform=selection.platform)
        return striped_topk_rows_local(
            q,
            gates,
            keys,
            None,
            rows,
            k=k,
            forced=forced,
            axis=self.shards.axis,
            tp=self.shards.tp,
            stripes=StripeConfig(rows=selection.stripe_rows, merge=selection.merge),
            platform=selection.platform,
        )


class Layer(nnx.Module):
    def __init__(self, c: GlmMoeDsaConfig, *, dtype, shards: Shards, full: bool, sparse: bool):
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = LatentAttention(c, dtype=dtype, shards=shards, full=full)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if sparse:
            self.mlp = MoE(c, dtype=dtype, shards=shards)
        else:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, shards=shards)
        self.shards = shards

    def __call__(self, h, cache, selected, cos, sin, step, selection):
        y, cache, selected = self.self_attn(self.input_layernorm(h), cos, sin, cache, step, selection, selected)
        h = h + y
        h = h + self.shards.sum_if(self.shards.mlp, self.mlp(self.post_attention_layernorm(h)))
        return h, cache, selected


class Model(nnx.Module):
    def __init__(self, c: GlmMoeDsaConfig, *, dtype, shards: Shards):
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype=dtype, shards=shards)
        self.layers = nnx.List(
            [
                Layer(c, dtype=dtype, shards=shards, full=i in c.indexer.full_layers, sparse=c.sparse_mlp[i])
                for i in range(c.num_layers)
            ]
        )
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class GlmMoeDsaDecoder(nnx.Module):
    """See serving.models.decoder.Decoder."""

    num_deepstack = 0

    def __init__(self, c: GlmMoeDsaConfig, *, dtype, tp: int):
        widths = (c.intermediate_size, c.moe_intermediate_size, c.shared_width)
        shards = Shards.of(tp, heads=c.num_heads, kv_heads=1, widths=widths, vocab=c.vocab_size)
        self.model = Model(c, dtype=dtype, shards=shards)
        self.lm_head = (
            None if c.tied else Linear(c.hidden_size, c.vocab_size, dtype=dtype, tp="out" if shards.vocab else None)
        )
        self.config, self.shards = c, shards
        self.hidden_size, self.vocab_size, self.indexer = c.hidden_size, c.vocab_size, c.indexer

    def caches(self) -> list[dict[str, CacheArray]]:
        c = self.config
        latent, index = CacheArray((c.kv_lora_rank + c.rope_dim,)), CacheArray((c.indexer.head_dim,))
        return [
            {"latent": latent, "index": index} if i in c.indexer.full_layers else {"latent": latent}
            for i in range(c.num_layers)
        ]

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.model.embed_tokens(ids)

    def forward(self, hidden, deepstack, caches, step: Step, selection: Selection):
        c = self.config
        cos, sin = rope_tables(step.positions[0], inverse_frequencies(c.rope_dim, c.rope_theta))
        h, new_caches, selections, selected = hidden, [], [], None
        run = traced_once(cos, sin, step, selection)
        for i, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            h, cache, selected = run(layer, h, cache, selected)
            new_caches.append(cache)
            if i in c.indexer.full_layers:
                selections.append(selected)
        return h, new_caches, selections

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return logits_of(self.model.norm(hidden), head.weight[...], self.shards)

    def collectives(self, *, embeds: bool, selection: Selection) -> dict[str, int]:
        s, c = self.shards, self.config
        full = len(c.indexer.full_layers)
        striped = full if selection.stripe_rows is not None else 0
        counts = {
            "all_reduce": s.all_reduces(c.num_layers) + int(embeds and s.vocab) + striped * (selection.merge == "pmax"),
            "all_gather": int(s.vocab) + striped * (selection.merge == "all_gather"),
        }
        return {name: n for name, n in counts.items() if n}


FAMILY = Family(
    build=lambda config, tp, dtype: GlmMoeDsaDecoder(GlmMoeDsaConfig.from_hf(config), dtype=dtype, tp=tp),
    disk_names=lambda path: (path,),
    owns=lambda tensor: True,
    ignore=lambda tensor: tensor.endswith("rotary_emb.inv_freq") or "shared_head." in tensor,
    image_token=lambda config: None,
    uses_mrope=False,
)
