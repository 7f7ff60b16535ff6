"""The Qwen3-VL text decoder: grouped-query attention with q/k norms, interleaved M-RoPE, deepstack."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsa_indexer import inverse_frequencies
from serving.models.config import field, positive, refuse, rope_settings
from serving.models.decoder import CacheArray, Family, Selection
from serving.models.layers import Embedding, SwiGLU, logits_of, mrope_tables, store_rows
from serving.models.paged_attention import paged_attention
from serving.models.shards import Shards, local_heads
from serving.models.step import Step
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import Linear, RMSNorm, rotate_half, traced_once
from vitstripe.platform import Platform


@dataclass(frozen=True)
class Qwen3VLTextConfig:
    """The fields of text_config that the decoder uses."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    tied: bool
    num_deepstack: int

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "Qwen3VLTextConfig":
        """Reads a Qwen3-VL config.json. Raises CheckpointError naming the field."""
        c = field(config, "text_config", dict)
        refuse(c, "hidden_act", ("silu",))
        refuse(c, "attention_bias", (False,))
        theta, rope = rope_settings(c)
        heads, kv_heads = positive(c, "num_attention_heads"), positive(c, "num_key_value_heads")
        head_dim = positive(c, "head_dim", positive(c, "hidden_size") // heads)
        sections = tuple(rope.get("mrope_section", ()))
        if len(sections) != 3 or sum(sections) != head_dim // 2:
            raise CheckpointError(
                f"config.json: mrope_section {list(sections)} must be three numbers that sum to "
                f"head_dim/2 = {head_dim // 2}"
            )
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} query heads are no multiple of {kv_heads} key heads")
        return Qwen3VLTextConfig(
            hidden_size=positive(c, "hidden_size"),
            intermediate_size=positive(c, "intermediate_size"),
            num_layers=positive(c, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=positive(c, "vocab_size"),
            rms_norm_eps=float(field(c, "rms_norm_eps", (int, float), 1e-6)),
            rope_theta=theta,
            mrope_section=sections,
            tied=bool(config.get("tie_word_embeddings", c.get("tie_word_embeddings", False))),
            num_deepstack=len(config.get("vision_config", {}).get("deepstack_visual_indexes", ())),
        )


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache; key and value rows are cached after norm and rotation."""

    def __init__(self, c: Qwen3VLTextConfig, *, dtype, shards: Shards):
        out = "out" if shards.heads else None
        kv_out = "out" if shards.kv else None
        self.q_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, dtype=dtype, tp=out)
        self.k_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, dtype=dtype, tp=kv_out)
        self.v_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, dtype=dtype, tp=kv_out)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, dtype=dtype, tp="in" if shards.heads else None)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.config, self.shards = c, shards

    def __call__(self, x: Float[Array, "T D"], cos, sin, cache, step: Step, platform: Platform | None):
        c = self.config
        q = rotate_half(self.q_norm(local_heads(self.q_proj(x), c.head_dim)), cos, sin)
        k = rotate_half(self.k_norm(local_heads(self.k_proj(x), c.head_dim)), cos, sin)
        v = local_heads(self.v_proj(x), c.head_dim)
        cache = {"k": store_rows(cache["k"], k, step.slots), "v": store_rows(cache["v"], v, step.slots)}
        kv_heads = None
        if self.shards.heads and not self.shards.kv:
            # Runs of local query heads that surely read one key head.
            local, group = q.shape[1], c.num_heads // c.num_kv_heads
            run = math.gcd(local, group)
            kv_heads = (self.shards.rank() * local + jnp.arange(0, local, run)) // group
        y = paged_attention(
            q,
            cache["k"],
            cache["v"],
            step.lengths,
            step.tile_request,
            step.page_table,
            scale=c.head_dim**-0.5,
            kv_heads=kv_heads,
            platform=platform,
        )
        return self.shards.sum_if(self.shards.heads, self.o_proj(y.reshape(x.shape[0], -1))), cache


class Layer(nnx.Module):
    def __init__(self, c: Qwen3VLTextConfig, *, dtype, shards: Shards):
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c, dtype=dtype, shards=shards)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, shards=shards)
        self.shards = shards

    def __call__(self, h, cache, cos, sin, step, platform):
        y, cache = self.self_attn(self.input_layernorm(h), cos, sin, cache, step, platform)
        h = h + y
        return h + self.shards.sum_if(self.shards.mlp, self.mlp(self.post_attention_layernorm(h))), cache


class Model(nnx.Module):
    def __init__(self, c: Qwen3VLTextConfig, *, dtype, shards: Shards):
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype=dtype, shards=shards)
        self.layers = nnx.List([Layer(c, dtype=dtype, shards=shards) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class Qwen3VLDecoder(nnx.Module):
    """See serving.models.decoder.Decoder."""

    indexer = None

    def __init__(self, c: Qwen3VLTextConfig, *, dtype, tp: int):
        shards = Shards.of(
            tp, heads=c.num_heads, kv_heads=c.num_kv_heads, widths=(c.intermediate_size,), vocab=c.vocab_size
        )
        self.model = Model(c, dtype=dtype, shards=shards)
        self.lm_head = (
            None if c.tied else Linear(c.hidden_size, c.vocab_size, dtype=dtype, tp="out" if shards.vocab else None)
        )
        self.config, self.shards = c, shards
        self.hidden_size, self.vocab_size, self.num_deepstack = c.hidden_size, c.vocab_size, c.num_deepstack

    def caches(self) -> list[dict[str, CacheArray]]:
        row = CacheArray((self.config.num_kv_heads, self.config.head_dim), cut=0 if self.shards.kv else None)
        return [{"k": row, "v": row} for _ in range(self.config.num_layers)]

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.model.embed_tokens(ids)

    def forward(self, hidden, deepstack, caches, step: Step, selection: Selection):
        c = self.config
        cos, sin = mrope_tables(step.positions, inverse_frequencies(c.head_dim, c.rope_theta), c.mrope_section)
        cos, sin = cos[:, None], sin[:, None]
        h, new_caches, run = hidden, [], traced_once(cos, sin, step, selection.platform)
        for i, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            h, cache = run(layer, h, cache)
            new_caches.append(cache)
            # Deepstack level i is added after decoder layer i; its rows are zero off the image tokens.
            if deepstack is not None and i < deepstack.shape[0]:
                h = h + deepstack[i]
        return h, new_caches, []

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return logits_of(self.model.norm(hidden), head.weight[...], self.shards)

    def collectives(self, *, embeds: bool, selection: Selection) -> dict[str, int]:
        s = self.shards
        counts = {
            "all_reduce": s.all_reduces(self.config.num_layers) + int(embeds and s.vocab),
            "all_gather": int(s.vocab),
        }
        return {name: n for name, n in counts.items() if n}


def _disk_names(path: str) -> Sequence[str]:
    if not path.startswith("model."):
        return (path,)
    rest = path.removeprefix("model.")
    return (f"model.language_model.{rest}", f"language_model.model.{rest}", f"model.{rest}")


FAMILY = Family(
    build=lambda config, tp, dtype: Qwen3VLDecoder(Qwen3VLTextConfig.from_hf(config), dtype=dtype, tp=tp),
    disk_names=_disk_names,
    owns=lambda tensor: "visual." not in tensor,
    ignore=lambda tensor: tensor.endswith("rotary_emb.inv_freq"),
    image_token=lambda config: config.get("image_token_id"),
    uses_mrope=True,
)
