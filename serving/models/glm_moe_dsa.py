"""The GLM-MoE-DSA decoder (GLM-5), and DeepSeek-V3.2's, which is the same with another configuration: multi-head latent
attention over the keys an indexer selects, and a mixture of experts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from dsa_indexer import Indexer, IndexerConfig, inverse_frequencies, rope_tables
from serving.models.config import field, positive, refuse, sparse_layers
from serving.models.decoder import IN_WEIGHTS_DTYPE, CacheFormats, Family, Selection
from serving.models.latent_attention import LatentAttention, LatentConfig
from serving.models.layers import Embedding, SwiGLU
from serving.models.moe import MoE, MoEConfig
from serving.models.shards import Shards
from serving.models.step import Step
from serving.models.trunk import Trunk
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import RMSNorm, traced_once


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
    sparse_mlp: tuple[bool, ...]
    moe: MoEConfig
    tied: bool
    indexer: IndexerConfig
    formats: CacheFormats

    @property
    def latent(self) -> LatentConfig:
        return LatentConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            norm_eps=self.latent_norm_eps,
            scale=self.scale,
            formats=self.formats,
        )

    @property
    def scale(self) -> float:
        """Of the softmax: a head's width ^-0.5, times the square of YaRN's magnitude if there is an mscale_all_dim."""
        plain, yarn = (self.nope_dim + self.rope_dim) ** -0.5, self.indexer.yarn
        if yarn is None or not yarn.mscale_all_dim:
            return plain
        return plain * (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2

    @staticmethod
    def from_hf(c: Mapping[str, Any], formats: CacheFormats = IN_WEIGHTS_DTYPE) -> "GlmMoeDsaConfig":
        """Reads a glm_moe_dsa or deepseek_v32 config.json. Raises CheckpointError naming the field.

        latent_norm_eps, the eps of q_a_layernorm and kv_a_layernorm, is no field of published configurations.
        transformers uses 1e-6 there whatever rms_norm_eps says, the serving engines use rms_norm_eps, and so do we
        unless config.json has the field.
        """
        refuse(c, "hidden_act", ("silu",))
        refuse(c, "attention_bias", (False,))
        refuse(c, "scoring_func", ("sigmoid",))
        layers = positive(c, "num_hidden_layers")
        eps = float(field(c, "rms_norm_eps", (int, float), 1e-5))
        try:
            indexer = IndexerConfig.from_hf(c, hadamard=formats.index_keys.is_fp8)
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
            sparse_mlp=sparse_layers(c, layers),
            moe=MoEConfig.sigmoid(c),
            tied=bool(c.get("tie_word_embeddings", False)),
            indexer=indexer,
            formats=formats,
        )


class Layer(nnx.Module):
    def __init__(self, c: GlmMoeDsaConfig, *, dtype, shards: Shards, full: bool, sparse: bool):
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        indexer = Indexer(c.indexer, dtype=dtype) if full else None
        self.self_attn = LatentAttention(c.latent, indexer, dtype=dtype, shards=shards)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if sparse:
            self.mlp = MoE(c.moe, dtype=dtype, shards=shards)
        else:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, shards=shards)
        self.shards = shards

    def __call__(self, h, cache, selected, angles, step, selection):
        y, cache, selected = self.self_attn(self.input_layernorm(h), angles, cache, step, selection, selected)
        h = h + y
        y = self.mlp(self.post_attention_layernorm(h), step.lengths > 0, selection.platform)
        return h + self.shards.sum_mlp(self.mlp.cut, y), cache, selected


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


class GlmMoeDsaDecoder(Trunk):
    """See serving.models.decoder.Decoder."""

    def __init__(self, c: GlmMoeDsaConfig, *, dtype, tp: int):
        shards = Shards.of(
            tp,
            heads=c.num_heads,
            kv_heads=1,
            widths=(c.intermediate_size, c.moe.shared_width),
            vocab=c.vocab_size,
            experts=c.moe.experts,
            expert_width=c.moe.width,
        )
        super().__init__(Model(c, dtype=dtype, shards=shards), c, dtype=dtype, shards=shards)
        self.indexer, self.formats = c.indexer, c.formats

    def forward(self, hidden, deepstack, caches, step: Step, selection: Selection):
        c = self.config
        yarn = c.indexer.yarn
        frequencies = inverse_frequencies(c.rope_dim, c.indexer.rope_theta, yarn)
        angles = rope_tables(step.positions[0], frequencies, 1.0 if yarn is None else yarn.amplitude)
        h, new_caches, selections, selected = hidden, [], [], None
        run = traced_once(angles, step, selection)
        for i, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            h, cache, selected = run(layer, h, cache, selected)
            new_caches.append(cache)
            if i in c.indexer.full_layers:
                selections.append(selected)
        return h, new_caches, selections


FAMILY = Family(
    build=lambda config, tp, dtype, formats=IN_WEIGHTS_DTYPE: GlmMoeDsaDecoder(
        GlmMoeDsaConfig.from_hf(config, formats), dtype=dtype, tp=tp
    ),
    disk_names=lambda path: (path,),
    owns=lambda tensor: True,
    ignore=lambda tensor: tensor.endswith("rotary_emb.inv_freq") or "shared_head." in tensor,
    image_token=lambda config: None,
    uses_mrope=False,
    has_indexer=True,
)
