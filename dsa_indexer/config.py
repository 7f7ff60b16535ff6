"""What an indexer is (from a Hugging Face config.json) and how its rows are striped."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_indexer.sharing import FULL, layer_types_of, source_layers

MERGES = ("pmax", "all_gather")


def _require_at_least(owner: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}.{name} is {value!r}; it must be an integer of at least {least}")


@dataclass(frozen=True)
class IndexerConfig:
    """The indexer of one model.

    num_heads H, head_dim D, topk K. rope_dim: the leading dimensions of a head that are rotated, in pairs (2j, 2j + 1).
    rope_theta: base of the rotary frequencies, for whoever makes cos and sin. q_lora_rank, hidden_size: input widths.
    layer_types: "full" or "shared" for each decoder layer; a shared layer has no indexer and reuses the selection of
    the last full layer before it.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_dim: int
    rope_theta: float
    q_lora_rank: int
    hidden_size: int
    layer_types: tuple[str, ...]

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "topk", "q_lora_rank", "hidden_size"):
            _require_at_least("IndexerConfig", name, getattr(self, name), 1)
        _require_at_least("IndexerConfig", "rope_dim", self.rope_dim, 0)
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(
                f"IndexerConfig.rope_dim is {self.rope_dim}; it must be even and at most head_dim = {self.head_dim}"
            )
        if not self.rope_theta > 0:
            raise ValueError(f"IndexerConfig.rope_theta is {self.rope_theta!r}; it must be positive")
        source_layers(self.layer_types)  # raises if there is nothing to share

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that own an indexer and a cache of index keys."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def source_layers(self) -> tuple[int, ...]:
        """For each layer, the full layer whose selection it attends to (itself if it is full)."""
        return source_layers(self.layer_types)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "IndexerConfig":
        """Reads the text part of a glm_moe_dsa config.json.

        Raises ValueError for a missing field, for another model_type and for a variant of the indexer (other rotary
        layout, other key norm, pooled keys) that would silently select other keys.
        """

        def need(name: str) -> Any:
            if config.get(name) is None:
                raise ValueError(f"config.json has no {name!r}, which the indexer needs")
            return config[name]

        for name, value, want in (
            ("model_type", need("model_type"), "glm_moe_dsa"),
            ("indexer_rope_interleave", config.get("indexer_rope_interleave", True), True),
            ("index_k_norm_type", config.get("index_k_norm_type") or "layer", "layer"),
            ("index_kpool", config.get("index_kpool") or 1, 1),
        ):
            if value != want:
                raise ValueError(f"config.json has {name} = {value!r}; this indexer supports {want!r} only")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ValueError(f"config.json has rope_type = {kind!r}; this indexer supports 'default' only")
        theta = rope.get("rope_theta")
        return cls(
            num_heads=need("index_n_heads"),
            head_dim=need("index_head_dim"),
            topk=need("index_topk"),
            rope_dim=need("qk_rope_head_dim"),
            rope_theta=float(need("rope_theta") if theta is None else theta),
            q_lora_rank=need("q_lora_rank"),
            hidden_size=need("hidden_size"),
            layer_types=layer_types_of(config),
        )


@dataclass(frozen=True)
class StripeConfig:
    """How query rows are dealt over the mesh.

    rows: S, the rows of a stripe; stripe i belongs to device i mod tp. Small stripes balance best and cost nothing,
        because a device scores all its stripes in one launch.
    merge: "pmax" (a buffer of -1 in which each row has one writer, then an elementwise max) or "all_gather" (half the
        bytes); both give the same bits.
    min_mean_keys: below this mean number of visible keys a row, `engages` declines: scoring that little costs less than
        the merge.
    """

    rows: int = 64
    merge: str = "pmax"
    min_mean_keys: int = 0

    def __post_init__(self):
        _require_at_least("StripeConfig", "rows", self.rows, 1)
        _require_at_least("StripeConfig", "min_mean_keys", self.min_mean_keys, 0)
        if self.merge not in MERGES:
            raise ValueError(f"StripeConfig.merge is {self.merge!r}; it must be one of {', '.join(MERGES)}")
