"""Which decoder layers own an indexer and which reuse the selection of an earlier one (IndexCache, arXiv 2603.12201).

layer      0     1     2     3       4       5       6     7       ...      index_topk_freq 4, offset 3
type       full  full  full  shared  shared  shared  full  shared
source     0     1     2     2       2       2       6     6

Hybrid models have layers of linear attention in between ("none"); a selection is carried past them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

FULL, SHARED, NONE = "full", "shared", "none"
_KINDS = (FULL, SHARED, NONE)


def _per_layer(config: Mapping[str, Any], name: str, num_layers: int) -> Sequence[str]:
    # Layers past num_hidden_layers are the speculative ones, which a list may or may not cover.
    entries = config[name]
    most = num_layers + (config.get("num_nextn_predict_layers") or 0)
    if not num_layers <= len(entries) <= most:
        raise ValueError(f"config.json has {len(entries)} entries in {name} for num_hidden_layers = {num_layers}")
    return entries[:num_layers]


def _linear_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """The layers of linear attention: layer_types, else linear_attn_config.kda_layers (counted from 0), else none."""
    if config.get("layer_types") is not None:
        types = _per_layer(config, "layer_types", num_layers)
        return frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    linear = config.get("linear_attn_config") or {}
    return frozenset(linear.get("kda_layers") or ())


def _sharing(config: Mapping[str, Any], num_layers: int) -> list[str]:
    for name, full, shared in (("indexer_types", FULL, SHARED), ("index_topk_pattern", "F", "S")):
        if config.get(name) is not None:
            entries = _per_layer(config, name, num_layers)
            if unknown := sorted({str(e) for e in entries if e not in (full, shared)}):
                raise ValueError(f"config.json has {', '.join(unknown)} in {name}; only {full!r}, {shared!r} exist")
            return [FULL if entry == full else SHARED for entry in entries]
    freq, offset = (
        default if config.get(name) is None else config[name]
        for name, default in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
    )
    if freq < 1 or offset < 1:
        raise ValueError(
            f"config.json has index_topk_freq = {freq} and index_skip_topk_offset = {offset}; both must be at least 1"
        )
    return [FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(num_layers)]


def layer_types_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """ "full", "shared" or "none" for each layer of a Hugging Face config.

    Taken from indexer_types, else index_topk_pattern ("F" and "S"), else index_topk_freq f (default 1) and
    index_skip_topk_offset o (default 2): layer i is full when max(i - o + 1, 0) is a multiple of f. Layers of linear
    attention are "none" whatever those say.
    Raises ValueError for an unknown entry, a wrong length, or f or o below 1.
    """
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"config.json has num_hidden_layers = {num_layers!r}; the indexer needs at least 1")
    linear = _linear_layers(config, num_layers)
    return tuple(NONE if i in linear else kind for i, kind in enumerate(_sharing(config, num_layers)))


def source_layers(layer_types: Sequence[str]) -> tuple[int | None, ...]:
    """For each layer the last full layer up to and including it; None for a layer that attends to no selection.

    Raises ValueError if an entry is unknown, if there is no full layer, or if a shared layer comes before the first.
    """
    if unknown := sorted({str(kind) for kind in layer_types if kind not in _KINDS}):
        raise ValueError(f"layer_types has {', '.join(unknown)}; only {', '.join(map(repr, _KINDS))} exist")
    sparse = [kind for kind in layer_types if kind != NONE]
    if not sparse or sparse[0] != FULL:
        raise ValueError(
            f"layer_types starts with {sparse[0] if sparse else 'nothing'!r}; the first layer with sparse attention "
            f"must be {FULL!r}, it has no earlier selection to share"
        )
    sources: list[int | None] = []
    latest = None
    for i, kind in enumerate(layer_types):
        latest = i if kind == FULL else latest
        sources.append(None if kind == NONE else latest)
    return tuple(sources)
