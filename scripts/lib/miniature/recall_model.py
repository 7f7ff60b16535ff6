"""Recall's decoder in training: the served module's own parameters and layers, with attention that has gradients.

The served forward runs over pages of a cache and selects without gradients. Here a batch of whole texts runs at once,
in one of two forms that compute the same function:

    masked    all pairs of tokens are scored, and a mask keeps the selected keys; for short texts, or dense (no mask)
    gathered  only the selected latent rows are read; for long texts

The indexer learns from the attention itself (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): the divergence of its
softmax from the attention's distribution over all keys, mean over heads and, as a shared layer has no indexer, over the
layers that use its selection. Its inputs are cut from the gradient. It is taken on sampled rows, most of them of
answers, against all their keys and not only the selected ones: what was not selected is what must be learned.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsa_indexer import Indexer, RowBatch, inverse_frequencies, rope_tables, topk_rows
from dsa_indexer.topk import select_topk
from scripts.lib.miniature.recall_tokenizer import VOCAB
from serving.models.glm_moe_dsa import GlmMoeDsaDecoder
from serving.models.latent_attention import LatentAttention, LatentConfig
from serving.models.moe import MoE, route
from vitstripe.nn import linear, rotate_pairs

SCORE_SCALE = 4.0
"""On the indexer's scores in its softmax alone; their order is what is served."""

_TOGETHER = 1024
"""Up to so many tokens a text, all texts are scored and selected from at once, else one after another."""


def hf_config(**changes: Any) -> dict[str, Any]:
    """config.json of Recall: 3.9 million parameters, 32 keys selected a row."""
    layers = 5
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": [VOCAB - 3, VOCAB - 2],
        "pad_token_id": VOCAB - 3,
        "hidden_act": "silu",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "qk_head_dim": 64,
        "head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 32,
        "indexer_types": ["full", "full", "shared", "full", "shared"],
        "layer_types": ["indexed_attention"] * layers,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "mlp_bias": False,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "initializer_range": 0.02,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
    }
    return config | changes


@dataclass(frozen=True)
class Form:
    """How attention is computed. selects: None for dense, "indexer", or "random" for the control. gathered: see
    above."""

    selects: str | None
    gathered: bool = False


class Output(NamedTuple):
    """hidden [B, T, D] before the last norm; divergence: of the indexers, mean over rows; balance: of the experts, 1 at
    best; recalled: the part of the attention that the selected keys hold, a full layer."""

    hidden: Array
    divergence: Array
    balance: Array
    recalled: Array


def _experts(mlp: MoE, x: Float[Array, "N D"]) -> tuple[Float[Array, "N D"], Array]:
    """MoE.__call__ with all experts computed and the unchosen weighted 0, and the balance loss of Switch (arXiv
    2101.03961)."""
    c = mlp.config
    scores, bias = jax.nn.sigmoid(mlp.gate(x)), mlp.gate.e_score_correction_bias
    assert bias is not None
    assert mlp.shared_experts is not None
    settings = {"groups": c.groups, "top_groups": c.top_groups, "normalise": c.normalise}
    ids, weights = route(scores, bias[...], top_k=c.chosen, scale=c.scale, **settings)
    chosen = jax.nn.one_hot(ids, c.experts)
    share = (weights[..., None] * chosen).sum(1)
    gate, up, down = (getattr(mlp.experts, n).weight[...] for n in ("gate_proj", "up_proj", "down_proj"))
    width = gate.shape[1]
    h = jax.nn.silu(linear(x, gate.reshape(-1, gate.shape[2]))) * linear(x, up.reshape(-1, up.shape[2]))
    h = h.reshape(-1, c.experts, width) * share[..., None].astype(x.dtype)
    y = linear(h.reshape(x.shape[0], -1), jnp.moveaxis(down, 0, 1).reshape(down.shape[1], -1))
    load = chosen.sum(1).mean(0) / c.chosen
    probability = (scores / scores.sum(-1, keepdims=True)).mean(0)
    return y + mlp.shared_experts(x), c.experts * (load * probability).sum()


_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


class _Projected(NamedTuple):
    """q [B, T, H, nope + rope]; latent [B, T, rank + rope]: the cached row; up [H, nope + value, rank]."""

    q: Array
    latent: Array
    up: Array


def _project(attention: LatentAttention, x: Float[Array, "B T D"], cos: Array, sin: Array) -> tuple[_Projected, Array]:
    c, (b, t, _) = attention.config, x.shape
    q_lora = attention.q_a_layernorm(attention.q_a_proj(x))
    q = attention.q_b_proj(q_lora).reshape(b, t, -1, c.nope_dim + c.rope_dim)
    q = jnp.concatenate([q[..., : c.nope_dim], rotate_pairs(q[..., c.nope_dim :], cos[:, None], sin[:, None])], -1)
    kv = attention.kv_a_proj_with_mqa(x)
    rank = c.kv_lora_rank
    latent = jnp.concatenate([attention.kv_a_layernorm(kv[..., :rank]), rotate_pairs(kv[..., rank:], cos, sin)], -1)
    return _Projected(q, latent, attention.kv_b_proj.weight[...].reshape(-1, c.nope_dim + c.value_dim, rank)), q_lora


def _absorbed(c: LatentConfig, q: Array, up: Array) -> Array:
    """[..., H, nope + rope] -> [..., H, rank + rope]: queries in the space of the latent rows."""
    latent = _einsum("...hn,hnr->...hr", q[..., : c.nope_dim], up[:, : c.nope_dim])
    return jnp.concatenate([latent.astype(q.dtype), q[..., c.nope_dim :]], -1)


def _all_scores(c: LatentConfig, p: _Projected, rows: Int[Array, "B R"] | None) -> Float[Array, "B H R T"]:
    """Attention scores of all rows, or of `rows`, against all keys; -inf where a key comes later."""
    t = p.latent.shape[1]
    if rows is None:
        rank = c.kv_lora_rank
        key = _einsum("btr,hnr->bthn", p.latent[..., :rank], p.up[:, : c.nope_dim])
        rope = jnp.broadcast_to(p.latent[:, :, None, rank:], (*key.shape[:3], c.rope_dim))
        key = jnp.concatenate([key.astype(p.q.dtype), rope], -1)
        scores = _einsum("bthc,bshc->bhts", p.q, key)
    else:
        q = _absorbed(c, jnp.take_along_axis(p.q, rows[:, :, None, None], 1), p.up)
        scores = _einsum("bthc,bsc->bhts", q, p.latent)
    return jnp.where(_visible(rows, t)[:, None], scores * (c.nope_dim + c.rope_dim) ** -0.5, -jnp.inf)


def _visible(rows: Int[Array, "B R"] | None, t: int) -> Bool[Array, "#B R T"]:
    at = jnp.arange(t)[None] if rows is None else rows
    return jnp.arange(t) <= at[..., None]


def _index_scores(q: Array, gates: Array, keys: Array, visible: Array) -> Float[Array, "B R T"]:
    """Differentiable scores [B, R, T]. q [B, R, H, D], gates [B, R, H], keys [B, T, D]."""
    scores = _einsum("brhd,btd->brht", q, keys)
    # No matrix product: some GPUs multiply float32 in a shorter format there, and a rounding reorders keys.
    scores = (jax.nn.relu(scores) * gates[..., None]).sum(2)
    return jnp.where(visible, scores, -jnp.inf)


def _select(form: Form, key: Array, k: int, q: Array, gates: Array, keys: Array) -> Int[Array, "B T K"]:
    """Positions of the keys each row attends to, as they are served; or random ones, as many, for the control."""
    b, t = keys.shape[:2]
    if form.selects == "random":
        noise = jax.random.uniform(key, (b, t, t)) if t <= 2048 else None
        if noise is not None:
            best, index = lax.top_k(jnp.where(_visible(None, t), noise, -1), min(k, t))
            return jnp.where(best >= 0, index, -1).astype(jnp.int32)
        # Drawn with repetition, which long rows seldom have; a repeat is dropped.
        index = jnp.sort((jax.random.uniform(key, (b, t, k)) * (jnp.arange(t)[:, None] + 1)).astype(jnp.int32), -1)
        repeat = jnp.concatenate([jnp.zeros((b, t, 1), bool), index[..., 1:] == index[..., :-1]], -1)
        return jnp.where(repeat, -1, index)
    lengths = jnp.arange(1, t + 1, dtype=jnp.int32)
    if t <= _TOGETHER:
        scores = _index_scores(q, gates, keys, _visible(None, t)).reshape(b * t, t)
        ks = jnp.zeros(b * t, jnp.int32)
        return select_topk(scores, ks, jnp.tile(lengths, b), k=k).reshape(b, t, k)
    rows = RowBatch(ks=jnp.zeros(t, jnp.int32), lengths=lengths)
    return lax.map(lambda one: topk_rows(one[0], one[1], one[2], None, rows, k=k), (q, gates, keys))


def _mask_of(selected: Int[Array, "B T K"], t: int) -> Bool[Array, "B T T"]:
    hot = jnp.zeros((*selected.shape[:2], t + 1), bool)
    b, m = jnp.ogrid[: selected.shape[0], : selected.shape[1]]
    where = jnp.where(selected < 0, t, selected)
    return hot.at[b[..., None], m[..., None], where].set(True)[..., :t]


def _softmax(scores: Array) -> Array:
    return jax.nn.softmax(scores, -1)


def _attend(c: LatentConfig, form: Form, p: _Projected, selected: Array | None, scores: Array | None) -> Array:
    """[B, T, H, value] of the selected keys (of all where selected is None)."""
    rank, dtype = c.kv_lora_rank, p.latent.dtype
    if form.gathered:
        assert selected is not None
        take = jax.vmap(lambda rows, index: rows[index])
        # Read as float32: the gradient is then summed by float32 atomics, which GPUs have.
        chosen = take(p.latent.astype(jnp.float32), jnp.where(selected < 0, 0, selected)).astype(dtype)
        q = _absorbed(c, p.q, p.up)
        s = _einsum("bthc,btkc->bthk", q, chosen)
        s = jnp.where((selected >= 0)[:, :, None], s * (c.nope_dim + c.rope_dim) ** -0.5, -1e30)
        y = _einsum("bthk,btkr->bthr", _softmax(s).astype(dtype), chosen[..., :rank]).astype(dtype)
        y = _einsum("bthr,hvr->bthv", y, p.up[:, c.nope_dim :])
        return y.astype(dtype)
    assert scores is not None
    if selected is not None:
        scores = jnp.where(_mask_of(selected, p.latent.shape[1])[:, None], scores, -1e30)
    value = _einsum("btr,hvr->bthv", p.latent[..., :rank], p.up[:, c.nope_dim :])
    y = _einsum("bhts,bshv->bthv", _softmax(scores).astype(dtype), value.astype(dtype))
    return y.astype(dtype)


def _divergence(target: Float[Array, "B R T"], index: Float[Array, "B R T"], row_weights: Array) -> Array:
    """KL(target || softmax(index)), a weighted mean over rows."""
    log_q = jax.nn.log_softmax(index * SCORE_SCALE, -1)
    entropy = jnp.where(target > 0, target * jnp.log(jnp.where(target > 0, target, 1)), 0)
    cross = jnp.where(target > 0, target * jnp.where(target > 0, log_q, 0), 0)
    return ((entropy - cross).sum(-1) * row_weights).sum() / row_weights.sum()


class _Lesson:
    """What one indexer is to learn: its scores of some rows, and the attention of all layers that use its selection."""

    def __init__(self, index: Float[Array, "B R T"], selected: Int[Array, "B T K"] | None):
        self.index, self.selected = index, selected
        self._targets: list[Array] = []

    def attend(self, scores: Float[Array, "B H R T"]) -> None:
        """Adds a layer's attention scores of the rows."""
        self._targets.append(lax.stop_gradient(_softmax(scores).mean(1)))

    def divergence(self, row_weights: Float[Array, "B R"]) -> Array:
        return _divergence(self._target(), self.index, row_weights)

    def held(self, rows: Int[Array, "B R"], row_weights: Float[Array, "B R"]) -> Array:
        """The part of the attention that the selected keys hold."""
        if self.selected is None:
            return jnp.float32(1)
        at = jnp.take_along_axis(self.selected, rows[:, :, None], 1)
        held = jnp.where(at >= 0, jnp.take_along_axis(self._target(), jnp.maximum(at, 0), 2), 0).sum(-1)
        return (held * row_weights).sum() / row_weights.sum()

    def _target(self) -> Array:
        return jnp.stack(self._targets).mean(0)


def _lesson(
    indexer: Indexer,
    x: Float[Array, "B T D"],
    q_lora: Float[Array, "B T L"],
    angles: tuple[Array, Array],
    rows: Int[Array, "B R"],
    key: Array,
    form: Form,
) -> _Lesson:
    """Runs an indexer: scores of `rows` with gradients, and the selection of all."""
    b, t, _ = x.shape
    flat = [jnp.broadcast_to(a, (b, *a.shape)).reshape(b * t, -1) for a in angles]
    still = lax.stop_gradient(x).reshape(b * t, -1)
    q, gates = indexer.queries(still, lax.stop_gradient(q_lora).reshape(b * t, -1), *flat)
    keys = indexer.keys(still, *flat).reshape(b, t, -1)
    q, gates = q.reshape(b, t, *q.shape[1:]), gates.reshape(b, t, -1)
    at = rows[:, :, None]
    of_rows = jnp.take_along_axis(q, at[..., None], 1), jnp.take_along_axis(gates, at, 1)
    index = _index_scores(*of_rows, keys, _visible(rows, t))
    if form.selects is None:
        return _Lesson(index, None)
    cut = [lax.stop_gradient(a) for a in (q, gates, keys)]
    return _Lesson(index, lax.stop_gradient(_select(form, key, indexer.config.topk, *cut)))


@partial(jax.named_call, name="recall")
def forward(
    decoder: GlmMoeDsaDecoder,
    ids: Int[Array, "B T"],
    rows: Int[Array, "B R"],
    row_weights: Float[Array, "B R"],
    key: Array,
    form: Form,
) -> Output:
    """All tokens of B texts, the last padded at will (attention is causal).

    rows: the query rows on which the indexers learn; row_weights: what each counts there. key: of the random control.
    """
    c, (b, t) = decoder.config.indexer, ids.shape
    angles = rope_tables(jnp.arange(t), inverse_frequencies(c.rope_dim, c.rope_theta))
    # Read as float32, so that a common token's gradient is not a sum of thousands of 16-bit terms.
    table = decoder.model.embed_tokens.weight[...]
    h = table.astype(jnp.float32)[ids].astype(table.dtype)
    balance: list[Array] = []
    lessons: list[_Lesson] = []
    for i, layer in enumerate(decoder.model.layers):
        attention = layer.self_attn
        sizes = attention.config
        x = layer.input_layernorm(h)
        p, q_lora = _project(attention, x, *angles)
        if isinstance(attention.indexer, Indexer):
            lessons.append(_lesson(attention.indexer, x, q_lora, angles, rows, jax.random.fold_in(key, i), form))
        scores = None if form.gathered else _all_scores(sizes, p, None)
        if scores is None:
            of_rows = _all_scores(sizes, jax.tree.map(lax.stop_gradient, p), rows)
        else:
            of_rows = jnp.take_along_axis(lax.stop_gradient(scores), rows[:, None, :, None], 2)
        lessons[-1].attend(of_rows)
        y = _attend(sizes, form, p, lessons[-1].selected, scores)
        h = h + attention.o_proj(y.reshape(b, t, -1))
        x = layer.post_attention_layernorm(h).reshape(b * t, -1)
        if isinstance(layer.mlp, MoE):
            y, even = _experts(layer.mlp, x)
            balance.append(even)
        else:
            y = layer.mlp(x)
        h = h + y.reshape(h.shape)
    return Output(
        h,
        jnp.stack([lesson.divergence(row_weights) for lesson in lessons]).mean(),
        jnp.stack(balance or [jnp.float32(1)]).mean(),
        jnp.stack([lesson.held(rows, row_weights) for lesson in lessons]),
    )


def logits_of(decoder: GlmMoeDsaDecoder, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    flat = decoder.logits(hidden.reshape(-1, hidden.shape[-1]))
    return flat.reshape(*hidden.shape[:-1], -1)
