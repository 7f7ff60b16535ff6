"""The training forward of a Qwen3-VL checkpoint: the tower's and the decoder's own modules, whole rows at a time.

Attention is a dense softmax under a mask: differentiable, and quick at these lengths. Nothing else differs from what
the server computes.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsa_indexer import inverse_frequencies
from scripts.lib.miniature.spec import Scores
from serving.models.gqa import GqaDecoder, GroupedQueryAttention
from serving.models.layers import mrope_tables
from vitbatch.towers.layers import axial_rotary
from vitbatch.towers.qwen3_vl import Qwen3VLVisionTower
from vitstripe.nn import rotate_half

# Far below any score and far from where float32 ends.
_MASKED = -1e30


def _attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """softmax(q k^T / sqrt(D)) v. q: [B, T, G, R, D], R query heads to each of G key heads; k, v: [B, S, G, D];
    mask: bool [B, T or 1, S]."""
    scores = jnp.einsum("btgrd,bsgd->bgrts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, _MASKED), -1).astype(v.dtype)
    return jnp.einsum("bgrts,bsgd->btgrd", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)


def _picked(values: Array, index: Array) -> Array:
    """values [B, S, D] at index [B, T], zeros where it is negative. A product with zeros and ones has the same bits as
    a gather, and its gradient is a product too and no scatter, which a GPU adds up one by one."""
    chosen = jax.nn.one_hot(index, values.shape[1], dtype=values.dtype)
    return jnp.einsum("bts,bsd->btd", chosen, values, preferred_element_type=jnp.float32).astype(values.dtype)


def _table_at(table: Array, index: Array, weight: Array) -> Array:
    """float32 sums of the table's rows at index [C, taps], weighted; see vitbatch.towers.layers.PositionTable."""
    taps = sum(
        jax.nn.one_hot(index[:, tap], table.shape[0], dtype=jnp.float32) * weight[:, tap, None]
        for tap in range(index.shape[1])
    )
    return jnp.dot(taps, table.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def picture_rows(tower: Qwen3VLVisionTower, batch: Mapping[str, Array]) -> Array:
    """Token rows of every picture, [N, P/4, O * (1 + K)]; those of padding mean nothing."""
    pixels, places = batch["pixels"], batch["places"]
    N, P, _ = pixels.shape
    # (pixel / 255 - mean) / std with mean and std 0.5, each frame of a patch the same picture.
    frame = pixels.reshape(N * P, 3, 1, -1).astype(jnp.float32) / 127.5 - 1
    rows = jnp.broadcast_to(frame, (N * P, 3, 2, frame.shape[-1])).reshape(N * P, -1)
    real = (jnp.arange(P) < batch["count"][:, None])[:, None, :]

    def attend(q: Array, k: Array, v: Array) -> Array:
        _, H, D = q.shape
        q, k, v = q.reshape(N, P, H, 1, D), k.reshape(N, P, H, D), v[:, -H:].reshape(N, P, H, D)
        return _attention(q, k, v, real).reshape(N * P, H, D)

    x = tower.patch_embed(rows.astype(tower.dtype))
    taps = batch["tap_index"].reshape(N * P, -1), batch["tap_weight"].reshape(N * P, -1)
    x = x + _table_at(tower.pos_embed.weight[...], *taps).astype(x.dtype)
    rotary, deepstack = axial_rotary(places.reshape(N * P, 2), tower.head_dim, tower.rope_theta), []
    for i, block in enumerate(tower.blocks):
        x = block(x, rotary, attend)
        if i in tower.deepstack_indexes:
            deepstack.append(tower.deepstack_merger_list[tower.deepstack_indexes.index(i)](x))
    return jnp.concatenate([tower.merger(x), *deepstack], -1).reshape(N, P // 4, -1)


def _self_attention(attention: GroupedQueryAttention, x: Array, cos: Array, sin: Array, mask: Array) -> Array:
    """x: [B * T, D]; cos, sin: [B * T, 1, F]; mask: bool [B, T, T]."""
    c = attention.config
    B, T, _ = mask.shape
    q = attention.q_proj(x).reshape(B * T, c.num_heads, c.head_dim)
    k = attention.k_proj(x).reshape(B * T, c.num_kv_heads, c.head_dim)
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    q = rotate_half(attention.q_norm(q), cos, sin).reshape(B, T, c.num_kv_heads, -1, c.head_dim)
    k = rotate_half(attention.k_norm(k), cos, sin).reshape(B, T, c.num_kv_heads, c.head_dim)
    v = attention.v_proj(x).reshape(B, T, c.num_kv_heads, c.head_dim)
    return attention.o_proj(_attention(q, k, v, mask).reshape(B * T, -1))


def answer_logits(decoder: GqaDecoder, rows: Array, batch: Mapping[str, Array]) -> Array:
    """float32 [B, A, V], of the tokens at `at`. rows: see picture_rows."""
    c, ids = decoder.config, batch["ids"]
    B, T = ids.shape
    placed = _picked(rows.reshape(B, -1, rows.shape[-1]), batch["rows"])
    placed = placed.reshape(B * T, 1 + c.num_deepstack, c.hidden_size)
    table = decoder.model.embed_tokens.weight[...]
    words = jnp.where(batch["rows"] < 0, ids, -1).reshape(1, B * T)
    h = _picked(table[None], words)[0] + placed[:, 0]

    positions = batch["positions"].transpose(1, 0, 2).reshape(3, B * T)
    cos, sin = mrope_tables(positions, inverse_frequencies(c.rotary_dim, c.rope_theta), c.mrope_section)
    cos, sin = cos[:, None], sin[:, None]
    segment = batch["segment"]
    mask = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    mask &= jnp.tril(jnp.ones((T, T), bool))
    for i, layer in enumerate(decoder.model.layers):
        h = h + _self_attention(layer.self_attn, layer.input_layernorm(h), cos, sin, mask)
        h = h + layer.mlp(layer.post_attention_layernorm(h))
        if i < c.num_deepstack:
            h = h + placed[:, 1 + i]
    answering = _picked(h.reshape(B, T, -1), batch["at"])
    return decoder.logits(answering.reshape(-1, c.hidden_size)).reshape(*batch["at"].shape, -1)


def score(modules: Mapping[str, nnx.Module], batch: Mapping[str, Array]) -> Scores:
    """Mean cross-entropy of the answer tokens, and which answers greedy decoding would give in full: it does exactly
    when each token is the likeliest after the right ones before it."""
    tower, decoder = modules["vision"], modules["text"]
    assert isinstance(tower, Qwen3VLVisionTower)
    assert isinstance(decoder, GqaDecoder)
    logits = answer_logits(decoder, picture_rows(tower, batch), batch)
    targets, task = batch["targets"], batch["task"]
    answered = targets >= 0
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = -jnp.where(answered, likelihood, 0).sum() / jnp.maximum(answered.sum(), 1)
    wrong = answered & (logits.argmax(-1) != targets)
    of_question = batch["slot"][..., None] == jnp.arange(task.shape[1])
    return Scores(loss, task, ~(wrong[..., None] & of_question).any(1), {})
