"""What the engine asks of a decoder, and the loop over layers that every family shares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from dsa_indexer import IndexerConfig
from serving.models.shards import Shards
from serving.models.step import Step
from vitstripe.platform import Platform

Cache = Any
"""One layer's cache arrays, a pytree: paged keys and values, or paged latent rows with index keys."""


@dataclass(frozen=True)
class CacheArray:
    """One array a layer keeps: shape a slot, and the dimension of it that is cut over the mesh.

    The engine allocates [pages, page_size, *slot_shape].
    """

    slot_shape: tuple[int, ...]
    cut: int | None = None


@dataclass(frozen=True)
class Selection:
    """How the sparse-attention indexer of a pass is run. stripe_rows: rows a stripe, None for replicated. platform:
    what the pass is compiled for, for whoever chooses kernels; None for the first device."""

    stripe_rows: int | None
    merge: str = "pmax"
    platform: Platform | None = None


class Decoder(Protocol):
    """A language model split over the mesh. embed, forward and logits run inside shard_map."""

    shards: Shards
    hidden_size: int
    vocab_size: int
    num_deepstack: int
    indexer: IndexerConfig | None

    def caches(self) -> Sequence[Mapping[str, CacheArray]]:
        """The cache arrays of each layer."""
        ...

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]: ...

    def forward(
        self,
        hidden: Float[Array, "T D"],
        deepstack: Float[Array, "K T D"] | None,
        caches: Sequence[Cache],
        step: Step,
        selection: Selection,
    ) -> tuple[Float[Array, "T D"], list[Cache], list[Int[Array, "T k"]]]:
        """Hidden rows after the last layer (before the last norm), the new caches, and the selections made."""
        ...

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """float32 logits over the whole vocabulary of any rows that `forward` gave."""
        ...

    def collectives(self, *, embeds: bool, selection: Selection) -> dict[str, int]:
        """StableHLO collectives of one pass with its logits. embeds: the pass looks its own tokens up."""
        ...


@dataclass(frozen=True)
class Family:
    """A decoder family: how to build it from config.json and where its tensors are.

    build(config.json, tp, dtype) -> module. disk_names(parameter path) -> tensor names to try.
    owns / ignore: see vitstripe.checkpoint.bind. image_token: config.json -> id of the image placeholder, or None.
    """

    build: Callable[[Mapping[str, Any], int, Any], Any]
    disk_names: Callable[[str], Sequence[str]]
    owns: Callable[[str], bool]
    ignore: Callable[[str], bool]
    image_token: Callable[[Mapping[str, Any]], int | None]
    uses_mrope: bool
