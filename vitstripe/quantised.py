"""Checkpoints with quantised weights: which are loaded, and block FP8 to the dtype of a parameter, on the devices.

Block FP8 (DeepSeek-V3's form, also in AMD Quark's files): `<name>` in float8 e4m3fn [o, i] and a float scale a block,
`<name>_scale_inv` or `<name>_scale` [ceil(o / 128), ceil(i / 128)]. Whatever its name, the scale multiplies. Blocks at
the edges are short. What is quantised is told by the tensors' dtypes, not by lists of module names in config.json.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Float32, Int32

FP8 = "F8_E4M3"
"""As safetensors names the dtype."""

RAW_DTYPES = {FP8: np.dtype(jnp.float8_e4m3fn)}
"""dtypes that safetensors' numpy side does not read."""

SCALES = ("_scale_inv", "_scale")
_INSTEAD = "use a checkpoint in bfloat16, or one with block FP8 weights (quant_method 'fp8' with weight_block_size)"


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization_config of a config.json, empty for plain weights."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        found = place.get("quantization_config")
        if isinstance(found, Mapping):
            return found
    return {}


def why_not(config: Mapping[str, Any], dtypes: Callable[[], Mapping[str, str]]) -> str | None:
    """What to tell whoever wants to load weights that are not loaded, or None. dtypes: gives tensor name -> safetensors
    dtype; only called where the configuration does not decide."""
    quantisation = quantisation_of(config)
    method = quantisation.get("quant_method")
    if method is None:
        return None
    if method == "quark":
        known = dtypes()
        packed = [name for name, dtype in known.items() if dtype == "U8" and name + "_scale" in known]
        if packed:
            return (
                f"config.json: quant_method 'quark' with MXFP4 weights ({len(packed)} tensors, {min(packed)} among "
                f"them); 4-bit weights are not loaded: {_INSTEAD}"
            )
        return None
    if method != "fp8":
        return f"config.json: quant_method {method!r} is not loaded: {_INSTEAD}"
    if not quantisation.get("weight_block_size"):
        return f"config.json: quant_method 'fp8' without weight_block_size (a scale a tensor) is not loaded: {_INSTEAD}"
    return None


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale; 128 x 128 unless quantization_config says otherwise. Raises
    ValueError for what is no pair of positive integers."""
    quantisation = quantisation_of(config)
    weight = (quantisation.get("global_quant_config") or {}).get("weight") or {}
    block = quantisation.get("weight_block_size") or (isinstance(weight, Mapping) and weight.get("block_size"))
    block = tuple(block or (128, 128))
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(f"config.json: weight_block_size is {list(block)}; it must be two positive integers")
    return block


def scaled(
    q: Float[Array, "o i"], scales: Float32[Array, "R C"], first: Int32[Array, " 2"], block: tuple[int, int], dtype
) -> Float[Array, "o i"]:
    """q * the scale of each element's block, in `dtype`. first: q's first row and column in the tensor whose blocks the
    scales are of, so that any part of a tensor finds its own, on a border of blocks or not."""
    rows, columns = (
        (first[axis] + jnp.arange(size, dtype=jnp.int32)) // block[axis] for axis, size in enumerate(q.shape)
    )
    return (q.astype(jnp.float32) * scales[rows][:, columns]).astype(dtype)


@cache
def dequantise(dtype: Any, sharding: Sharding, block: tuple[int, int]):
    """(q, scales, first) -> `scaled` of the whole of q, cut like `sharding`: every device makes its own part."""
    cut = None
    if isinstance(sharding, NamedSharding):
        cut = next((axis for axis, name in enumerate(sharding.spec) if name is not None), None)
    if cut is None:
        return jax.jit(lambda q, scales, first: scaled(q, scales, first, block, dtype), out_shardings=sharding)
    assert isinstance(sharding, NamedSharding)
    name, whole = sharding.spec[cut], PartitionSpec()

    def part(q, scales, first):
        return scaled(q, scales, first.at[cut].add(lax.axis_index(name) * q.shape[cut]), block, dtype)

    mapped = jax.shard_map(part, mesh=sharding.mesh, in_specs=(sharding.spec, whole, whole), out_specs=sharding.spec)
    return jax.jit(mapped, out_shardings=sharding)
