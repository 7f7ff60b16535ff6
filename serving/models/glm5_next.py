"""The GLM-5-Next decoder (GLM-5.3-Flash): layers of linear attention (KDA) with a layer of sparse latent attention
after every few, both between hyper-connections, and a mixture of experts. Nothing is rotated: order is in the
recurrence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from dsa_indexer import IndexerConfig, PooledIndexer
from serving.models.config import field, positive, refuse, sparse_layers, text_config
from serving.models.decoder import IN_WEIGHTS_DTYPE, CacheFormats, Family, Selection
from serving.models.hyper_connections import HyperConfig, HyperConnection, collapse, join, spread
from serving.models.kda import KdaConfig, KimiDeltaAttention
from serving.models.latent_attention import LatentAttention, LatentConfig
from serving.models.layers import Embedding, SwiGLU
from serving.models.moe import MoE, MoEConfig, swiglu_limit
from serving.models.shards import Shards
from serving.models.trunk import Trunk, names_beside_a_tower
from vitstripe.checkpoint import CheckpointError
from vitstripe.nn import RMSNorm, traced_once

_LINEAR, _SPARSE = "linear_attention", ("indexed_attention", "full_attention", "deepseek_sparse_attention")


@dataclass(frozen=True)
class Glm5NextConfig:
    """The fields of config.json that the decoder uses. linear, sparse_mlp: by layer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    limit: float | None
    linear: tuple[bool, ...]
    sparse_mlp: tuple[bool, ...]
    hyper: HyperConfig
    kda: KdaConfig
    latent: LatentConfig
    moe: MoEConfig
    tied: bool
    indexer: IndexerConfig

    @staticmethod
    def from_hf(config: Mapping[str, Any], formats: CacheFormats = IN_WEIGHTS_DTYPE) -> "Glm5NextConfig":
        """Reads a glm5_next config.json, or a text-only one with the fields at its top. Raises CheckpointError naming
        the field.

        Layers of linear attention: layer_types, else linear_attn_config.kda_layers (counted from 0), else all but every
        fourth. What else linear_attn_config says stands above the fields linear_*.
        """
        c = text_config(config)
        refuse(c, "hidden_act", ("silu",))
        refuse(c, "attention_bias", (False,))
        refuse(c, "qk_rope_head_dim", (0, None))
        layers, eps = positive(c, "num_hidden_layers"), float(field(c, "rms_norm_eps", (int, float), 1e-5))
        linear = _linear_layers(c, layers)
        kinds = [_LINEAR if is_linear else _SPARSE[0] for is_linear in linear]
        try:
            indexer = IndexerConfig.from_hf(
                {**c, "model_type": "glm5_next", "layer_types": kinds, "qk_rope_head_dim": 0},
                hadamard=formats.index_keys.is_fp8,
            )
        except ValueError as error:
            raise CheckpointError(f"config.json: {error}") from error
        hidden = positive(c, "hidden_size")
        return Glm5NextConfig(
            hidden_size=hidden,
            intermediate_size=positive(c, "intermediate_size"),
            num_layers=layers,
            vocab_size=positive(c, "vocab_size"),
            rms_norm_eps=eps,
            limit=swiglu_limit(c),
            linear=linear,
            sparse_mlp=sparse_layers(c, layers),
            hyper=HyperConfig(
                streams=positive(c, "hc_mult", 4),
                iterations=positive(c, "hc_sinkhorn_iters", 20),
                eps=float(field(c, "hc_eps", (int, float), 1e-6)),
                norm_eps=eps,
            ),
            kda=_kda(c, hidden, eps),
            latent=LatentConfig(
                hidden_size=hidden,
                num_heads=positive(c, "num_attention_heads"),
                q_lora_rank=positive(c, "q_lora_rank"),
                kv_lora_rank=positive(c, "kv_lora_rank"),
                nope_dim=positive(c, "qk_nope_head_dim"),
                rope_dim=0,
                value_dim=positive(c, "v_head_dim"),
                # The two latent norms use rms_norm_eps here, in every implementation.
                norm_eps=eps,
                formats=formats,
            ),
            moe=MoEConfig.sigmoid(c),
            tied=bool(config.get("tie_word_embeddings", c.get("tie_word_embeddings", False))),
            indexer=indexer,
        )


def _linear_layers(c: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = c.get("layer_types")
    if types is not None:
        if len(types) < layers or not set(types) <= {_LINEAR, *_SPARSE}:
            names = ", ".join((_LINEAR, *_SPARSE))
            raise CheckpointError(f"config.json: layer_types must name one of {names} for each of {layers} layers")
        return tuple(kind == _LINEAR for kind in types[:layers])
    named = (c.get("linear_attn_config") or {}).get("kda_layers")
    return tuple(i % 4 != 3 if named is None else i in named for i in range(layers))


def _kda(c: Mapping[str, Any], hidden: int, eps: float) -> KdaConfig:
    old = field(c, "linear_attn_config", dict, {})
    own = {
        "linear_num_heads": old.get("num_heads"),
        "linear_head_dim": old.get("head_dim"),
        "linear_conv_kernel_dim": old.get("short_conv_kernel_size"),
    }
    c = {**c, **{name: value for name, value in own.items() if value is not None}}
    bound = old.get("gate_lower_bound", c.get("linear_lower_bound", -5.0))
    # transformers: a safe gate, the default, has its bound even where the field is null.
    if bound is None and old and old.get("safe_gate", True):
        bound = -5.0
    if bound is not None and not (isinstance(bound, (int, float)) and bound < 0):
        raise CheckpointError(f"config.json: the lower bound of the gate is {bound!r}; it must be below 0, or null")
    taps = positive(c, "linear_conv_kernel_dim", 4)
    if taps < 2:
        raise CheckpointError(f"config.json: linear_conv_kernel_dim is {taps}; it must be at least 2")
    return KdaConfig(
        hidden_size=hidden,
        heads=positive(c, "linear_num_heads"),
        head_dim=positive(c, "linear_head_dim"),
        taps=taps,
        lower_bound=None if bound is None else float(bound),
        norm_eps=eps,
    )


class Layer(nnx.Module):
    """A mixer and an MLP, each between a hyper-connection that collapses the streams and what joins its output to
    them. The sums over devices are of rows [T, D], before they are spread over the streams."""

    def __init__(self, c: Glm5NextConfig, i: int, *, dtype, shards: Shards):
        self.hc_attn = HyperConnection(c.hidden_size, c.hyper)
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if c.linear[i]:
            self.self_attn = KimiDeltaAttention(c.kda, dtype=dtype, shards=shards)
        else:
            indexer = PooledIndexer(c.indexer, dtype=dtype) if i in c.indexer.full_layers else None
            self.self_attn = LatentAttention(c.latent, indexer, dtype=dtype, shards=shards)
        self.hc_ffn = HyperConnection(c.hidden_size, c.hyper)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if c.sparse_mlp[i]:
            self.mlp = MoE(c.moe, dtype=dtype, shards=shards)
        else:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, shards=shards, limit=c.limit)
        self.shards = shards

    def __call__(self, h, cache, selected, step, selection):
        x, mixing = self.hc_attn(h, selection.platform)
        x = self.input_layernorm(x)
        if isinstance(self.self_attn, KimiDeltaAttention):
            y, cache = self.self_attn(x, cache, step)
        else:
            y, cache, selected = self.self_attn(x, None, cache, step, selection, selected)
        h = join(h, y, mixing)
        x, mixing = self.hc_ffn(h, selection.platform)
        x = self.post_attention_layernorm(x)
        y = self.mlp(x, step.lengths > 0, selection.platform)
        return join(h, self.shards.sum_mlp(self.mlp.cut, y), mixing), cache, selected


class Model(nnx.Module):
    def __init__(self, c: Glm5NextConfig, *, dtype, shards: Shards):
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype=dtype, shards=shards)
        self.layers = nnx.List([Layer(c, i, dtype=dtype, shards=shards) for i in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class Glm5NextDecoder(Trunk):
    """See serving.models.decoder.Decoder."""

    def __init__(self, c: Glm5NextConfig, *, dtype, tp: int):
        shards = Shards.of(
            tp,
            # The heads of both kinds of mixers are cut, or none: one flag decides.
            heads=math.gcd(c.latent.num_heads, c.kda.heads),
            kv_heads=1,
            widths=(c.intermediate_size, c.moe.shared_width),
            vocab=c.vocab_size,
            experts=c.moe.experts,
            expert_width=c.moe.width,
        )
        super().__init__(Model(c, dtype=dtype, shards=shards), c, dtype=dtype, shards=shards)
        self.indexer, self.formats = c.indexer, c.latent.formats

    def forward(self, hidden, deepstack, caches, step, selection: Selection):
        c, last = self.config, None
        h, new_caches, selections = spread(hidden, c.hyper.streams), [], []
        run = traced_once(step, selection)
        for i, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            full = i in c.indexer.full_layers
            # Who does not read the last selection is not given it: one trace a kind of layer, not two.
            h, cache, selected = run(layer, h, cache, None if full or c.linear[i] else last)
            new_caches.append(cache)
            if full:
                last = selected
                selections.append(selected)
        return collapse(h), new_caches, selections


def _disk_names(path: str) -> Sequence[str]:
    # A site's parameters stand beside the layer's modules: `hc_attn_fn` for the path hc_attn.fn.
    return names_beside_a_tower(path.replace(".hc_attn.", ".hc_attn_").replace(".hc_ffn.", ".hc_ffn_"))


FAMILY = Family(
    build=lambda config, tp, dtype, formats=IN_WEIGHTS_DTYPE: Glm5NextDecoder(
        Glm5NextConfig.from_hf(config, formats), dtype=dtype, tp=tp
    ),
    disk_names=_disk_names,
    owns=lambda tensor: "visual." not in tensor,
    ignore=lambda tensor: tensor.endswith("rotary_emb.inv_freq") or "shared_head." in tensor or "hc_head" in tensor,
    image_token=lambda config: config.get("image_token_id"),
    uses_mrope=False,
    has_indexer=True,
)
