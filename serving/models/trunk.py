"""What every family's decoder has around its layers: the embedding before them, norm and head behind them."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from dsa_indexer import IndexerConfig
from serving.models.decoder import IN_WEIGHTS_DTYPE, CacheArray, Selection
from serving.models.layers import logits_of
from serving.models.shards import Shards
from vitstripe.nn import Linear


class Trunk(nnx.Module):
    """See serving.models.decoder.Decoder, of which a family adds `forward`.

    model: embed_tokens, layers and norm. c: the family's configuration.
    """

    num_deepstack = 0
    indexer: IndexerConfig | None = None
    formats = IN_WEIGHTS_DTYPE

    def __init__(self, model: Any, c: Any, *, dtype, shards: Shards):
        self.model = model
        self.lm_head = (
            None if c.tied else Linear(c.hidden_size, c.vocab_size, dtype=dtype, tp="out" if shards.vocab else None)
        )
        self.config, self.shards = c, shards
        self.hidden_size, self.vocab_size = c.hidden_size, c.vocab_size

    def caches(self) -> list[dict[str, CacheArray]]:
        return [layer.self_attn.caches() for layer in self.model.layers]

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.model.embed_tokens(ids)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return logits_of(self.model.norm(hidden), head.weight[...], self.shards)

    def layer_sums(self) -> int:
        """all-reduces of one pass over the layers, without what an indexer merges."""
        return self.shards.all_reduces(self.config.num_layers, sum(self.config.sparse_mlp))

    def collectives(self, *, embeds: bool, selection: Selection) -> dict[str, int]:
        vocab = self.shards.vocab
        merges = 0 if self.indexer is None or selection.stripe_rows is None else len(self.indexer.full_layers)
        counts = {
            "all_reduce": self.layer_sums() + int(embeds and vocab) + merges * (selection.merge == "pmax"),
            "all_gather": int(vocab) + merges * (selection.merge == "all_gather"),
        }
        return {name: n for name, n in counts.items() if n}


def names_beside_a_tower(path: str) -> tuple[str, ...]:
    """Where checkpoints that hold a tower as well keep a parameter of the decoder."""
    if not path.startswith("model."):
        return (path,)
    rest = path.removeprefix("model.")
    return (f"model.language_model.{rest}", f"language_model.model.{rest}", f"model.{rest}")
