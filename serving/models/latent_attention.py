"""Multi-head latent attention over the keys an indexer selects (DeepSeek-V3.2, GLM-5, GLM-5.3).

Absorbed form throughout: a query is carried into the latent space and attends to the one cached latent row a token, so
the cache is the same on every device and heads are cut.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsa_indexer import Indexer, LatentRows, PooledIndexer, encode_latents, sparse_mla, to_paged
from serving.models.decoder import IN_WEIGHTS_DTYPE, CacheArray, CacheFormats, Selection
from serving.models.layers import store_rows
from serving.models.selected_keys import Angles, index_caches, select
from serving.models.shards import Shards, local_heads
from serving.models.step import Step
from vitstripe.nn import Linear, RMSNorm, rotate_pairs


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of a latent attention. A head's query is nope_dim columns, then rope_dim rotated ones (0: none is, and
    the cached row is the latent alone). norm_eps: of q_a_layernorm and kv_a_layernorm. scale: of the softmax, None for
    (nope_dim + rope_dim)^-0.5. formats: of what is cached."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    scale: float | None = None
    formats: CacheFormats = IN_WEIGHTS_DTYPE


class LatentAttention(nnx.Module):
    """The attention of one layer. A "full" layer owns an indexer; a "shared" one has none and takes the selection of
    the last full layer before it."""

    def __init__(self, c: LatentConfig, indexer: Indexer | PooledIndexer | None, *, dtype, shards: Shards):
        out, into = ("out", "in") if shards.heads else (None, None)
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, dtype=dtype)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, eps=c.norm_eps)
        self.q_b_proj = Linear(c.q_lora_rank, c.num_heads * (c.nope_dim + c.rope_dim), dtype=dtype, tp=out)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.rope_dim, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, eps=c.norm_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_heads * (c.nope_dim + c.value_dim), dtype=dtype, tp=out)
        self.o_proj = Linear(c.num_heads * c.value_dim, c.hidden_size, dtype=dtype, tp=into)
        self.indexer = indexer
        self.config, self.shards = c, shards

    def caches(self) -> dict[str, CacheArray]:
        """What the layer keeps: a latent row a token, and its indexer's keys. float8 latents have a scale each, and
        rotated columns beside them an array of their own."""
        c = self.config
        if c.formats.latents.is_fp8:
            kept = {
                "latent": CacheArray((c.kv_lora_rank,), dtype=c.formats.latents.jax_dtype),
                "latent_scales": CacheArray((), dtype=jnp.float32),
            }
            if c.rope_dim:
                kept["latent_rotated"] = CacheArray((c.rope_dim,))
        else:
            kept = {"latent": CacheArray((c.kv_lora_rank + c.rope_dim,))}
        return kept if self.indexer is None else kept | index_caches(self.indexer.config, c.formats.index_keys)

    @jax.named_scope("mixer")
    def __call__(self, x: Float[Array, "T D"], angles: Angles, cache, step: Step, selection: Selection, selected):
        """(y [T, D], the layer's cache, the selection it used [T, K]). angles: cos and sin of the rotated columns, None
        where none is rotated. selected: that of the last full layer, not read by a full one."""
        c, rank = self.config, self.config.kv_lora_rank
        q_lora = self.q_a_layernorm(self.q_a_proj(x))
        q = local_heads(self.q_b_proj(q_lora), c.nope_dim + c.rope_dim)
        kv = self.kv_a_proj_with_mqa(x)
        latent, rotated, q_rope = self.kv_a_layernorm(kv[:, :rank]), None, None
        if angles is not None:
            cos, sin = angles
            q_rope = rotate_pairs(q[..., c.nope_dim :], cos[:, None], sin[:, None])
            rotated = rotate_pairs(kv[:, rank:], cos, sin)
        cache = self._store(latent, rotated, cache, step)
        if self.indexer is not None:
            form = c.formats.index_keys
            cache, selected = select(self.indexer, form, x, q_lora, angles, cache, step, selection, self.shards)
        up = self.kv_b_proj.weight[...].reshape(-1, c.nope_dim + c.value_dim, rank)
        q_latent = jnp.einsum(
            "thn,hnr->thr", q[..., : c.nope_dim], up[:, : c.nope_dim], preferred_element_type=jnp.float32
        ).astype(q.dtype)
        y = sparse_mla(
            q_latent if q_rope is None else jnp.concatenate([q_latent, q_rope], -1),
            self._rows(cache),
            self._slots(selected, cache["latent"].shape[1], step),
            scale=(c.nope_dim + c.rope_dim) ** -0.5 if c.scale is None else c.scale,
            value_dim=rank,
            platform=selection.platform,
        )
        y = jnp.einsum("thr,hvr->thv", y, up[:, c.nope_dim :], preferred_element_type=jnp.float32).astype(x.dtype)
        return self.shards.sum_if(self.shards.heads, self.o_proj(y.reshape(x.shape[0], -1))), cache, selected

    def _store(self, latent: Float[Array, "T V"], rotated: Float[Array, "T r"] | None, cache, step: Step):
        """The cache with the rows of this pass."""
        if not self.config.formats.latents.is_fp8:
            row = latent if rotated is None else jnp.concatenate([latent, rotated], -1)
            return {**cache, "latent": store_rows(cache["latent"], row, step.slots)}
        values, scales = encode_latents(latent, self.config.formats.latents)
        new = {"latent": values, "latent_scales": scales}
        if rotated is not None:
            new["latent_rotated"] = rotated
        return {**cache, **{name: store_rows(cache[name], rows, step.slots) for name, rows in new.items()}}

    def _rows(self, cache) -> Float[Array, "slots C"] | LatentRows:
        """The cached rows, a slot each."""
        flat = {name: a.reshape(-1, *a.shape[2:]) for name, a in cache.items() if name.startswith("latent")}
        if not self.config.formats.latents.is_fp8:
            return flat["latent"]
        return LatentRows(flat["latent"], flat["latent_scales"], flat.get("latent_rotated"))

    @staticmethod
    def _slots(selected: Int[Array, "T K"], page_size: int, step: Step) -> Int[Array, "T K"]:
        request = jnp.repeat(step.tile_request, step.tile)
        return to_paged(selected, request, step.page_table, page_size)
