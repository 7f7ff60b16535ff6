"""The projections of an indexer: hidden states to index keys, queries and gates."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from dsa_indexer.config import IndexerConfig
from vitstripe.nn import LayerNorm, Linear, param, rotate_pairs

K_NORM_EPS = 1e-6  # of the released models, whatever their rms_norm_eps says


class Gates(nnx.Module):
    """`weights_proj`: one weight a head, float32 throughout (a rounding here reorders keys)."""

    def __init__(self, in_features: int, out_features: int):
        self.weight = param((out_features, in_features), jnp.float32)

    def __call__(self, x: Float[Array, "T I"]) -> Float32[Array, "T H"]:
        dims = (((1,), (1,)), ((), ()))
        # HIGHEST, because the default of some GPUs multiplies float32 in a shorter format.
        return lax.dot_general(x.astype(jnp.float32), self.weight[...], dims, precision=lax.Precision.HIGHEST)


class Indexer(nnx.Module):
    """The indexer of one full layer (DeepSeek-V3.2's lightning indexer as GLM uses it: rotary pairs (2j, 2j + 1)).

        score(m, n) = sum_h gates[m, h] * relu(queries[m, h] . keys[n])

    Parameters carry their Hugging Face names below `...self_attn.indexer.`; all are replicated over the mesh.
    """

    def __init__(self, config: IndexerConfig, dtype):
        width = config.num_heads * config.head_dim
        self.wq_b = Linear(config.q_lora_rank, width, dtype=dtype)
        self.wk = Linear(config.hidden_size, config.head_dim, dtype=dtype)
        self.k_norm = LayerNorm(config.head_dim, eps=K_NORM_EPS)
        self.weights_proj = Gates(config.hidden_size, config.num_heads)
        self.config = config

    def _rotate(self, x: Float[Array, "*B D"], cos: Float[Array, "*#B r"], sin: Float[Array, "*#B r"]):
        r = self.config.rope_dim  # the rotated part of an index head comes first, unlike in the attention head
        return jnp.concatenate([rotate_pairs(x[..., :r], cos, sin), x[..., r:]], -1)

    def keys(
        self, x: Float[Array, "T hidden"], cos: Float[Array, "T r"], sin: Float[Array, "T r"]
    ) -> Float[Array, "T D"]:
        """Index keys, one a token. x: input of the attention block (after input_layernorm). cos, sin: rope_dim / 2
        angles of each token's position."""
        return self._rotate(self.k_norm(self.wk(x)), cos, sin)

    def queries(
        self,
        x: Float[Array, "T hidden"],
        q_lora: Float[Array, "T rank"],
        cos: Float[Array, "T r"],
        sin: Float[Array, "T r"],
    ) -> tuple[Float[Array, "T H D"], Float32[Array, "T H"]]:
        """Index queries and gates. q_lora: q_a_layernorm(q_a_proj(x)). The gates hold the factor (H * D)^-0.5, so
        that the score needs no further scaling. Gates may be negative."""
        heads, dim = self.config.num_heads, self.config.head_dim
        q = self.wq_b(q_lora).reshape(-1, heads, dim)
        return self._rotate(q, cos[:, None], sin[:, None]), self.weights_proj(x) * (heads * dim) ** -0.5
