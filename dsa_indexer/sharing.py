"""Which decoder layers own an indexer and which reuse the selection of an earlier one (IndexCache, arXiv 2603.12201).

layer      0     1     2     3       4       5       6     7       ...      index_topk_freq 4, offset 3
type       full  full  full  shared  shared  shared  full  shared
source     0     1     2     2       2       2       6     6
"""

from collections.abc import Mapping, Sequence
from typing import Any

FULL, SHARED = "full", "shared"


def _per_layer(config: Mapping[str, Any], name: str, num_layers: int) -> Sequence[str]:
    # Layers past num_hidden_layers are the speculative ones, which a list may or may not cover.
    entries = config[name]
    most = num_layers + (config.get("num_nextn_predict_layers") or 0)
    if not num_layers <= len(entries) <= most:
        raise ValueError(f"config.json has {len(entries)} entries in {name} for num_hidden_layers = {num_layers}")
    return entries[:num_layers]


def layer_types_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """ "full" or "shared" for each layer of a Hugging Face config.

    Taken from indexer_types, else index_topk_pattern ("F" and "S"), else index_topk_freq f (default 1) and
    index_skip_topk_offset o (default 2): layer i is full when max(i - o + 1, 0) is a multiple of f.
    Raises ValueError for an unknown entry, a wrong length, or f or o below 1.
    """
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"config.json has num_hidden_layers = {num_layers!r}; the indexer needs at least 1")
    for name, full, shared in (("indexer_types", FULL, SHARED), ("index_topk_pattern", "F", "S")):
        if config.get(name) is not None:
            entries = _per_layer(config, name, num_layers)
            if unknown := sorted({str(e) for e in entries if e not in (full, shared)}):
                raise ValueError(f"config.json has {', '.join(unknown)} in {name}; only {full!r}, {shared!r} exist")
            return tuple(FULL if entry == full else SHARED for entry in entries)
    freq, offset = (
        default if config.get(name) is None else config[name]
        for name, default in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
    )
    if freq < 1 or offset < 1:
        raise ValueError(
            f"config.json has index_topk_freq = {freq} and index_skip_topk_offset = {offset}; both must be at least 1"
        )
    return tuple(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(num_layers))


def source_layers(layer_types: Sequence[str]) -> tuple[int, ...]:
    """For each layer the last full layer up to and including it.

    Raises ValueError if an entry is neither "full" nor "shared" or the first is not "full".
    """
    if unknown := sorted({str(kind) for kind in layer_types if kind not in (FULL, SHARED)}):
        raise ValueError(f"layer_types has {', '.join(unknown)}; only {FULL!r} and {SHARED!r} exist")
    if not layer_types or layer_types[0] != FULL:
        raise ValueError(
            f"layer_types starts with {layer_types[0] if layer_types else 'nothing'!r}; the first layer must be "
            f"{FULL!r}, it has no earlier selection to share"
        )
    sources: list[int] = []
    for i, kind in enumerate(layer_types):
        sources.append(i if kind == FULL else sources[-1])
    return tuple(sources)
