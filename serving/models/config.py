"""Reading decoder configurations out of an HF config.json, with errors that name the field."""

from collections.abc import Mapping
from typing import Any

from vitstripe.checkpoint import CheckpointError


def field(config: Mapping[str, Any], name: str, kind: type | tuple[type, ...] = int, default: Any = None) -> Any:
    """config[name] (or `default` when absent or null), checked to be of `kind`. Raises CheckpointError."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json lacks {name!r}")
    if isinstance(value, bool) and kind is not bool:
        raise CheckpointError(f"config.json: {name} is {value!r}, which is no number")
    if not isinstance(value, kind):
        raise CheckpointError(f"config.json: {name} is {value!r}, which has the wrong type")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: its text_config, or the whole of a text-only one."""
    return field(config, "text_config", dict) if "text_config" in config else config


def positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = field(config, name, int, default)
    if value < 1:
        raise CheckpointError(f"config.json: {name} is {value}; it must be at least 1")
    return value


def rope_settings(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """(theta, rope fields) from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`.

    Only plain rotary frequencies are built; another rope_type is refused.
    """
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = field(config, name, dict, {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"config.json: rope_type {kind!r} is not supported, only 'default'")
    theta = field(rope, "rope_theta", (int, float), field(config, "rope_theta", (int, float), 10000.0))
    return float(theta), rope


def refuse(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raises when a field that changes the mathematics has a value that is not built."""
    if config.get(name, allowed[0]) not in allowed:
        raise CheckpointError(f"config.json: {name}={config[name]!r} is not supported, only {allowed[0]!r}")


def sparse_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer's MLP is a mixture of experts: mlp_layer_types, else all but the first first_k_dense_replace
    (3 by default)."""
    types = config.get("mlp_layer_types")
    if types is None:
        dense = field(config, "first_k_dense_replace", int, 3)
        return tuple(i >= dense for i in range(layers))
    if len(types) < layers or not set(types) <= {"dense", "sparse"}:
        raise CheckpointError(f"config.json: mlp_layer_types must name 'dense' or 'sparse' for {layers} layers")
    return tuple(kind == "sparse" for kind in types[:layers])
