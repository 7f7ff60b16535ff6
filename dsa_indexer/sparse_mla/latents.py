"""A latent cache in float8, as the attention over selected keys reads it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from dsa_indexer.quant import KeyFormat, quantise


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales", "rest"], meta_fields=[])
@dataclass(frozen=True)
class LatentRows:
    """Cached latents in float8 with a scale each, a row a slot: row j stands for [values[j] * scales[j] | rest[j]].

    values: [slots, V], float8_e4m3fn or float8_e4m3fnuz; scales: float32 [slots] (`encode_latents` gives both). rest:
    what is not rounded, the rotated key [slots, C - V] in the queries' dtype; None where there is none.
    """

    # Any, because a pytree's leaves are not always arrays: shape structs and a kernel's references pass through here.
    values: Any
    scales: Any
    rest: Any = None

    @property
    def width(self) -> int:
        """C, columns of a row."""
        return self.values.shape[1] + (0 if self.rest is None else self.rest.shape[1])


def encode_latents(latents: Float[Array, "*B V"], form: KeyFormat) -> tuple[Float[Array, "*B V"], Float32[Array, "*B"]]:
    """float8 latents and their scales, one a row, as `LatentRows` holds them: latents are about values * scales.

    A row with a NaN or an infinity has a scale of NaN, since `widen` sees none in the values: whoever selects the row
    gets NaN, and nobody else. Raises ValueError if the format is not float8.
    """
    values, scales = quantise(latents, form)
    return values, jnp.where(jnp.all(jnp.isfinite(latents), -1), scales, jnp.nan)


def widen(values: Array) -> Array:
    """A block of float8 latents in bfloat16, divided by `widened_by`, which is exact; for kernels.

    Pallas converts no float8_e4m3fnuz. Sign, exponent and fraction of one, at their places in a float16, are 2^-7 of
    the number: the exponents' biases are 8 and 15, and what is subnormal in one is in the other. NaN becomes zero.
    """
    if values.dtype != jnp.float8_e4m3fnuz:
        return values.astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int16) << 7
    half = lax.bitcast_convert_type(bits & jnp.int16(~(1 << 14)), jnp.float16)
    # Nothing is rounded: a fraction has three bits, and the upper half of a float32 is a bfloat16.
    bits = lax.shift_right_logical(lax.bitcast_convert_type(half.astype(jnp.float32), jnp.int32), 16)
    return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16)


def widened_by(dtype: Any) -> float:
    """What a number that `widen` gives is to be multiplied by."""
    return 2.0**7 if dtype == jnp.float8_e4m3fnuz else 1.0
