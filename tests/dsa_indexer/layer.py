"""Layer 1 of a reference checkpoint: its indexer, bound by name, and the attention around it."""

import json
from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from dsa_indexer import Indexer, IndexerConfig, PooledIndexer, rope_tables, sparse_mla
from dsa_indexer.rope import inverse_frequencies
from tests.helpers import GOLDENS, det
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, bind, load, raise_problems
from vitstripe.nn import linear, rotate_pairs

TOLERANCE = 5e-6
# transformers uses 1e-6 in q_a_layernorm and kv_a_layernorm of these two whatever rms_norm_eps says.
_LATENT_EPS = {"deepseek_v32": 1e-6, "glm_moe_dsa": 1e-6}


def bind_indexer(checkpoint: Checkpoint, config: IndexerConfig, layer: int, prefix: str):
    prefix = f"{prefix}layers.{layer}.self_attn.indexer."
    kind = Indexer if config.pool is None else PooledIndexer
    return bind(
        checkpoint,
        lambda: kind(config, jnp.float32),
        name="indexer",
        disk_names=lambda path: (prefix + path,),
        owns=lambda tensor: tensor.startswith(prefix),
    )


class Layer:
    """changes: fields of the indexer's configuration to set otherwise than the checkpoint does."""

    def __init__(self, family: str, **changes):
        self.folder = GOLDENS / family
        checkpoint = Checkpoint(self.folder)
        self.hf = checkpoint.config.get("text_config", checkpoint.config)
        self.config = replace(IndexerConfig.from_hf(checkpoint.config), **changes)
        prefix = "model.language_model." if "text_config" in checkpoint.config else "model."
        binding = bind_indexer(checkpoint, self.config, 1, prefix)
        raise_problems(checkpoint, [binding])
        self.graphdef, self.state = binding.graphdef, load(checkpoint, binding, make_mesh(1))
        self.latent_eps = _LATENT_EPS.get(family, self.hf["rms_norm_eps"])
        prefix += "layers.1.self_attn."
        self.weights = {
            name.removeprefix(prefix): jnp.asarray(checkpoint.read(name).astype(np.float32))
            for name in checkpoint.tensors
            if name.startswith(prefix) and ".indexer." not in name
        }
        self.index, self.attend = jax.jit(self._index), jax.jit(self._attend)
        self.pool_keys = jax.jit(lambda keys, scores: self.indexer().pool_keys(keys, scores))

    @cached_property
    def golden(self) -> dict[str, np.ndarray]:
        with safe_open(self.folder / "golden_indexer.safetensors", framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)

    @cached_property
    def meta(self) -> dict:
        return json.loads((self.folder / "meta.json").read_text())["indexer"]

    def hidden(self, name: str) -> jax.Array:
        return jnp.asarray(det(self.meta[name]["hidden_shape"], self.meta[name]["hidden_seed"])[0])

    def packed(self, name: str) -> jax.Array:
        """Several prompts, one after another."""
        lengths, seeds = self.meta[name]["lengths"], self.meta[name]["hidden_seeds"]
        parts = [det((n, self.hf["hidden_size"]), seed) for n, seed in zip(lengths, seeds, strict=True)]
        return jnp.asarray(np.concatenate(parts))

    def indexer(self):
        return nnx.merge(self.graphdef, self.state)

    def project(self, name: str, x: jax.Array) -> jax.Array:
        return linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.latent_eps)
        return x * scale * self.weights[f"{name}.weight"]

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions, inverse_frequencies(self.config.rope_dim, self.config.rope_theta))

    def q_lora(self, x: jax.Array) -> jax.Array:
        return self.norm("q_a_layernorm", self.project("q_a_proj", x))

    def _index(self, x: jax.Array, positions: jax.Array):
        """q, gates, and the keys; for pooled keys their raw form and the compression scores."""
        cos, sin = self.angles(positions)
        indexer = self.indexer()
        keys = indexer.keys(x, cos, sin) if isinstance(indexer, Indexer) else indexer.token_keys(x)
        return (*indexer.queries(x, self.q_lora(x), cos, sin), keys)

    def _attend(self, x: jax.Array, positions: jax.Array, slots: jax.Array) -> jax.Array:
        hf, (cos, sin) = self.hf, self.angles(positions)
        heads, nope, rank = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["kv_lora_rank"]
        q = self.project("q_b_proj", self.q_lora(x)).reshape(len(x), heads, -1)
        q_rope = rotate_pairs(q[..., nope:], cos[:, None], sin[:, None])
        up = self.weights["kv_b_proj.weight"].reshape(heads, -1, rank)
        absorbed = jnp.einsum("thn,hnr->thr", q[..., :nope], up[:, :nope])
        compressed = self.project("kv_a_proj_with_mqa", x)
        latent = self.norm("kv_a_layernorm", compressed[:, :rank])
        kv = jnp.concatenate([latent, rotate_pairs(compressed[:, rank:], cos, sin)], -1)
        out = sparse_mla(
            jnp.concatenate([absorbed, q_rope], -1),
            kv,
            slots,
            scale=(nope + self.config.rope_dim) ** -0.5,
            value_dim=rank,
        )
        values = jnp.einsum("thr,hvr->thv", out, up[:, nope:])
        return self.project("o_proj", values.reshape(len(x), -1))
