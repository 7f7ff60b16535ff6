"""What the engine asks of a decoder, and the loop over layers that every family shares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from dsa_indexer import IndexerConfig, KeyFormat
from serving.models.shards import Shards
from serving.models.step import Step
from vitstripe.platform import Platform

Cache = Any
"""One layer's cache arrays, a pytree: paged keys and values, latent rows with index keys, a state a request."""

WEIGHTS_DTYPE = KeyFormat()
"""Kept in the dtype of the weights."""


@dataclass(frozen=True)
class CacheFormats:
    """How a decoder with an indexer keeps its caches: index_keys that are scored, and the latents that are attended to.
    Both in the dtype of the weights unless said otherwise; rotated columns always."""

    index_keys: KeyFormat = WEIGHTS_DTYPE
    latents: KeyFormat = WEIGHTS_DTYPE


IN_WEIGHTS_DTYPE = CacheFormats()


@dataclass(frozen=True)
class CacheArray:
    """One array a layer keeps between passes, in slots. Who a slot belongs to decides what the engine allocates:

        a token                [pages, page_size, *slot_shape]
        `every` tokens         [pages, page_size // every, *slot_shape]; slot i of a request is for its tokens
                               [i * every, (i + 1) * every)
        per_request: a request [max_seqs, *slot_shape]; the row is the request's seat, and holds anything, another
                               request's state or NaN, until the request's first pass has written it

    cut: the dimension of slot_shape that is cut over the mesh, None for replicated. dtype: None for the weights' own.
    Raises ValueError for `every` below 1, or with per_request.
    """

    slot_shape: tuple[int, ...]
    cut: int | None = None
    every: int = 1
    per_request: bool = False
    dtype: Any = None

    def __post_init__(self):
        if self.every < 1 or (self.per_request and self.every != 1):
            raise ValueError(f"every is {self.every}; a slot is for a request or for one or more tokens")

    def lead(self, pages: int, page_size: int, max_seqs: int) -> tuple[int, ...]:
        """The dimensions before slot_shape. Raises ValueError for a page that is no whole number of slots."""
        if self.per_request:
            return (max_seqs,)
        if page_size % self.every:
            raise ValueError(
                f"page_size is {page_size}; this model keeps a cache slot for every {self.every} tokens and needs a "
                f"multiple of it"
            )
        return (pages, page_size // self.every)


@dataclass(frozen=True)
class Selection:
    """How the sparse-attention indexer of a pass is run. stripe_rows: rows a stripe, None for replicated. platform:
    what the pass is compiled for, for whoever chooses kernels; None for the first device."""

    stripe_rows: int | None
    merge: str = "pmax"
    platform: Platform | None = None


class Decoder(Protocol):
    """A language model split over the mesh. embed, forward and logits run inside shard_map. formats: of the caches of
    one with an indexer."""

    shards: Shards
    hidden_size: int
    vocab_size: int
    num_deepstack: int
    indexer: IndexerConfig | None
    formats: CacheFormats

    def caches(self) -> Sequence[Mapping[str, CacheArray]]:
        """The cache arrays of each layer. If any is per request, prefixes are not shared between requests (a state is
        only ever that of all its tokens), and a request's rows of a prefill pass start at a multiple of
        serving.config.STATE_CHUNK."""
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

    build(config.json, tp, dtype) -> module; with an indexer build(config.json, tp, dtype, formats), too, for
    CacheFormats other than the weights' dtype. disk_names(parameter path) -> tensor names to try.
    owns / ignore: see vitstripe.checkpoint.bind. image_token: config.json -> id of the image placeholder, or None.
    why_not: of a tensor of the file, why a checkpoint that has it is not loaded, or None. has_indexer: whether its
    models select the keys they attend to; what they attend to are cached latents then.
    """

    build: Callable[..., Any]
    disk_names: Callable[[str], Sequence[str]]
    owns: Callable[[str], bool]
    ignore: Callable[[str], bool]
    image_token: Callable[[Mapping[str, Any]], int | None]
    uses_mrope: bool
    why_not: Callable[[str], str | None] = lambda tensor: None
    has_indexer: bool = False
