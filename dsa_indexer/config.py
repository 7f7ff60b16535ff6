"""What an indexer is (from a Hugging Face config.json) and how its rows are striped."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsa_indexer.hadamard import require_power_of_two
from dsa_indexer.rope import Yarn
from dsa_indexer.sharing import FULL, layer_types_of, source_layers
from dsa_indexer.topk import NOTHING_FORCED, ForcedTokens

MERGES = ("pmax", "all_gather")
K_NORMS = ("layer", "rms")
K_NORM_EPS = 1e-6
"""Of the released models and of every engine, whatever their rms_norm_eps says."""

# model_type -> whether the rotary pairs are (2j, 2j + 1) where config.json does not say.
_INTERLEAVED = {"deepseek_v32": False, "glm_moe_dsa": True, "glm5_next": True}

MODEL_TYPES = tuple(_INTERLEAVED)
"""Whose config.json `IndexerConfig.from_hf` reads."""


def _require_at_least(owner: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}.{name} is {value!r}; it must be an integer of at least {least}")


@dataclass(frozen=True)
class IndexerConfig:
    """The indexer of one model.

    num_heads H, head_dim D, topk K. q_lora_rank, hidden_size: input widths.
    layer_types: "full", "shared" or "none" for each decoder layer; a shared layer has no indexer and reuses the
        selection of the last full layer before it, a layer of linear attention ("none") has no use for one.
    rope_dim: the leading dimensions of a head that are rotated, 0 for none. rope_interleaved: in pairs (2j, 2j + 1),
        else (j, j + rope_dim / 2). The wrong choice shows only in prompts longer than K.
    rope_theta, yarn: the rotary frequencies, for whoever makes cos and sin (`dsa_indexer.rope`).
    k_norm: "layer" (mean-subtracting, with bias) or "rms"; k_norm_eps: its epsilon.
    hadamard: rotate queries and keys alike before they are quantised. A cache must be read with the switch it was
        written with.
    pool: P, consecutive tokens that share one key (GLM-5.3's pooled keys; see `PooledIndexer`); None for a key a
        token. K must be a multiple of P: K / P pools are selected.
    forced: the first and the last keys of a row that are selected whatever their scores, for the selection functions.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_dim: int
    rope_theta: float
    q_lora_rank: int
    hidden_size: int
    layer_types: tuple[str, ...]
    rope_interleaved: bool = True
    yarn: Yarn | None = None
    k_norm: str = "layer"
    k_norm_eps: float = K_NORM_EPS
    hadamard: bool = False
    pool: int | None = None
    forced: ForcedTokens = NOTHING_FORCED

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "topk", "q_lora_rank", "hidden_size"):
            _require_at_least("IndexerConfig", name, getattr(self, name), 1)
        _require_at_least("IndexerConfig", "rope_dim", self.rope_dim, 0)
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(
                f"IndexerConfig.rope_dim is {self.rope_dim}; it must be even and at most head_dim = {self.head_dim}"
            )
        for name in ("rope_theta", "k_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"IndexerConfig.{name} is {getattr(self, name)!r}; it must be positive")
        if self.k_norm not in K_NORMS:
            raise ValueError(f"IndexerConfig.k_norm is {self.k_norm!r}; it must be one of {', '.join(K_NORMS)}")
        if self.hadamard:
            require_power_of_two(self.head_dim)
        if self.pool is not None:
            _require_at_least("IndexerConfig", "pool", self.pool, 1)
            if self.topk % self.pool:
                raise ValueError(f"IndexerConfig.topk is {self.topk}; it must be a multiple of pool = {self.pool}")
            if self.forced != NOTHING_FORCED:
                raise ValueError(f"IndexerConfig has forced = {self.forced} and a pool; pools are never forced")
        source_layers(self.layer_types)  # raises if there is nothing to share

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that own an indexer and a cache of index keys."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def source_layers(self) -> tuple[int | None, ...]:
        """For each layer, the full layer whose selection it attends to: itself if it is full, None if it attends to
        none."""
        return source_layers(self.layer_types)

    @property
    def selected(self) -> int:
        """What top-k is asked for: K keys, or K / P pools."""
        return self.topk // (self.pool or 1)

    @property
    def width(self) -> int:
        """Columns of a selection of tokens: K, and with pools the P - 1 tokens of an open pool besides."""
        return self.topk + (self.pool or 1) - 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, hadamard: bool = False) -> "IndexerConfig":
        """Reads a deepseek_v32, glm_moe_dsa or glm5_next config.json, or its text_config.

        hadamard is no field of published configurations: engines turn it on with float8 keys.
        Raises ValueError for a missing field, for another model_type and for a variant of the indexer that would
        silently select other keys.
        """
        config = config.get("text_config") or config

        def need(name: str) -> Any:
            if config.get(name) is None:
                raise ValueError(f"config.json has no {name!r}, which the indexer needs")
            return config[name]

        family = need("model_type").removesuffix("_text")
        if family not in _INTERLEAVED:
            raise ValueError(
                f"config.json has model_type = {config['model_type']!r}; this indexer knows {', '.join(_INTERLEAVED)}"
            )
        pool = need("index_kpool") if family == "glm5_next" else None
        if pool is None and (config.get("index_kpool") or 1) != 1:
            raise ValueError(f"config.json has index_kpool = {config['index_kpool']}; only glm5_next pools its keys")
        for name in ("index_kpool_compress", "index_kpool_always_select_tail"):
            if pool is not None and not config.get(name, True):
                raise ValueError(f"config.json has {name} = {config[name]!r}; pooled keys need it true")
        rope_dim = need("qk_rope_head_dim")
        theta, yarn = _rope(config, need) if rope_dim else (1.0, None)
        interleaved = config.get("indexer_rope_interleave")
        eps = config.get("index_k_norm_eps")
        return cls(
            num_heads=need("index_n_heads"),
            head_dim=need("index_head_dim"),
            topk=need("index_topk"),
            rope_dim=rope_dim,
            rope_theta=theta,
            q_lora_rank=need("q_lora_rank"),
            hidden_size=need("hidden_size"),
            layer_types=layer_types_of(config),
            rope_interleaved=_INTERLEAVED[family] if interleaved is None else bool(interleaved),
            yarn=yarn,
            k_norm=config.get("index_k_norm_type") or "layer",
            k_norm_eps=K_NORM_EPS if eps is None else float(eps),
            hadamard=hadamard,
            pool=pool,
            forced=ForcedTokens(config.get("index_init_tokens") or 0, config.get("index_local_tokens") or 0),
        )


def _rope(config: Mapping[str, Any], need: Callable[[str], Any]) -> tuple[float, Yarn | None]:
    """theta and YaRN from rope_parameters, or from the older rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise ValueError(f"config.json has rope_type = {kind!r}; this indexer knows 'default' and 'yarn'")
    theta = rope.get("rope_theta")
    theta = float(need("rope_theta") if theta is None else theta)
    return theta, Yarn.from_hf(rope, config.get("max_position_embeddings")) if kind == "yarn" else None


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
