"""The projections of an indexer: hidden states to index keys, queries and gates."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from dsa_indexer.config import IndexerConfig
from dsa_indexer.hadamard import hadamard
from vitstripe.nn import LayerNorm, Linear, RMSNorm, param, rotate_half, rotate_pairs


class Gates(nnx.Module):
    """`weights_proj`: one weight a head, float32 throughout (a rounding here reorders keys)."""

    def __init__(self, in_features: int, out_features: int):
        self.weight = param((out_features, in_features), jnp.float32)

    def __call__(self, x: Float[Array, "T I"]) -> Float32[Array, "T H"]:
        dims = (((1,), (1,)), ((), ()))
        # HIGHEST, because the default of some GPUs multiplies float32 in a shorter format.
        return lax.dot_general(x.astype(jnp.float32), self.weight[...], dims, precision=lax.Precision.HIGHEST)


class IndexProjections(nnx.Module):
    """What indexers with and without pooled keys share: the parameters, the queries and a token's raw key."""

    def __init__(self, config: IndexerConfig, dtype):
        width = config.num_heads * config.head_dim
        norm = {"layer": LayerNorm, "rms": RMSNorm}[config.k_norm]
        self.wq_b = Linear(config.q_lora_rank, width, dtype=dtype)
        self.wk = Linear(config.hidden_size, config.head_dim, dtype=dtype)
        self.k_norm = norm(config.head_dim, eps=config.k_norm_eps)
        self.weights_proj = Gates(config.hidden_size, config.num_heads)
        self.config = config

    def _rotate(self, x: Float[Array, "*B D"], cos: Array | None, sin: Array | None) -> Float[Array, "*B D"]:
        r = self.config.rope_dim  # the rotated part of an index head comes first, unlike in the attention head
        if not r:
            return x
        if cos is None or sin is None:
            raise ValueError(f"the indexer rotates {r} dimensions of a head; pass cos and sin of {r // 2} angles")
        rotate = rotate_pairs if self.config.rope_interleaved else rotate_half
        return jnp.concatenate([rotate(x[..., :r], cos, sin), x[..., r:]], -1)

    def _spread(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        # The one place of the switch, for queries and keys alike: a score between the two spaces means nothing.
        return hadamard(x) if self.config.hadamard else x

    def _token_keys(
        self, x: Float[Array, "T hidden"], cos: Float[Array, "T r"] | None, sin: Float[Array, "T r"] | None
    ) -> Float[Array, "T D"]:
        return self._rotate(self.k_norm(self.wk(x)), cos, sin)

    @jax.named_scope("project")
    def queries(
        self,
        x: Float[Array, "T hidden"],
        q_lora: Float[Array, "T rank"],
        cos: Float[Array, "T r"] | None = None,
        sin: Float[Array, "T r"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Float32[Array, "T H"]]:
        """Index queries and gates, in x's dtype and in float32. q_lora: q_a_layernorm(q_a_proj(x)).

        The gates hold the factor (H * D)^-0.5, so that the score needs no further scaling. Gates may be negative.
        cos, sin: rope_dim / 2 angles of each token's position; none for a model that does not rotate.
        """
        heads, dim = self.config.num_heads, self.config.head_dim
        q = self.wq_b(q_lora).reshape(-1, heads, dim)
        if cos is not None and sin is not None:
            cos, sin = cos[:, None], sin[:, None]
        return self._spread(self._rotate(q, cos, sin)), self.weights_proj(x) * (heads * dim) ** -0.5


class Indexer(IndexProjections):
    """The indexer of one full layer with a key a token: DeepSeek-V3.2's lightning indexer, also as GLM-5 uses it.

        score(m, n) = sum_h gates[m, h] * relu(queries[m, h] . keys[n])

    Parameters carry their Hugging Face names below `...self_attn.indexer.`; all are replicated over the mesh.
    For float8, pass queries and keys through `encode_queries` and `encode_keys`.
    Raises ValueError for a config with pooled keys.
    """

    def __init__(self, config: IndexerConfig, dtype):
        if config.pool is not None:
            raise ValueError(f"the config pools {config.pool} tokens into a key; use PooledIndexer")
        super().__init__(config, dtype)

    @jax.named_scope("project")
    def keys(
        self,
        x: Float[Array, "T hidden"],
        cos: Float[Array, "T r"] | None = None,
        sin: Float[Array, "T r"] | None = None,
    ) -> Float[Array, "T D"]:
        """Index keys, one a token, in x's dtype. x: input of the attention block (after input_layernorm)."""
        return self._spread(self._token_keys(x, cos, sin))
