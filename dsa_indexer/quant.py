"""Float8 index queries and keys: one float32 scale a vector."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

AMAX_FLOOR = 1e-4
"""Smallest magnitude a scale is made for (DeepSeek-V3.2's reference): an all-zero vector gets a scale, too."""

# The largest value a quantised element may take. float8_e4m3fnuz reaches 240; the field clips index vectors at 224
# there, half of the other format's limit, so that the same bytes mean half the value under twice the scale.
_DEFAULT_LIMITS = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0}
_FNUZ_ARCHS = ("gfx940", "gfx941", "gfx942")
_FIRST_FP8_SM = 89


@dataclass(frozen=True)
class KeyFormat:
    """How index keys are cached and index queries are multiplied. Both sides use one format.

    dtype: "float32", "bfloat16", "float8_e4m3fn" or "float8_e4m3fnuz"; None keeps the model's dtype.
    power_of_two: float8 scales are rounded up to a power of two (scale_fmt "ue8m0" of DeepSeek-V3.2).
    limit: largest magnitude of a float8 element; None is 448 for float8_e4m3fn and 224 for float8_e4m3fnuz.
    """

    dtype: str | None = None
    power_of_two: bool = False
    limit: float | None = None

    def __post_init__(self):
        allowed = (None, "float32", "bfloat16", *_DEFAULT_LIMITS)
        if self.dtype not in allowed:
            raise ValueError(f"KeyFormat.dtype is {self.dtype!r}; it must be one of {', '.join(map(str, allowed))}")
        if not self.is_fp8 and (self.power_of_two or self.limit is not None):
            raise ValueError(
                f"KeyFormat.power_of_two is {self.power_of_two} and limit {self.limit} for dtype {self.dtype}; "
                f"only float8 keys have a scale"
            )
        if self.limit is not None:
            most = float(jnp.finfo(self.jax_dtype).max)
            if not 0 < self.limit <= most:
                raise ValueError(f"KeyFormat.limit is {self.limit}; {self.dtype} holds magnitudes up to {most:g}")

    @classmethod
    def fp8(cls, arch: str, *, power_of_two: bool = False) -> "KeyFormat":
        """The float8 format of an accelerator (`vitstripe.platform.Platform.arch`; "" is CUDA or a CPU).

        gfx940 to gfx942 multiply float8_e4m3fnuz; gfx950, gfx12 and CUDA from sm89 on multiply float8_e4m3fn. The same
        bits read as the other format are off by a factor of two. Raises ValueError for an architecture without float8.
        """
        if arch in _FNUZ_ARCHS:
            return cls("float8_e4m3fnuz", power_of_two)
        is_cuda = arch.startswith("sm") and int(arch.removeprefix("sm")) >= _FIRST_FP8_SM
        if arch in ("", "gfx950") or arch.startswith("gfx12") or is_cuda:
            return cls("float8_e4m3fn", power_of_two)
        raise ValueError(f"{arch} has no float8 matrix units this library knows; use KeyFormat('bfloat16')")

    @property
    def is_fp8(self) -> bool:
        """Whether vectors of this format carry a scale."""
        return self.dtype in _DEFAULT_LIMITS

    @property
    def jax_dtype(self) -> np.dtype | None:
        """dtype as numpy's; None where the model's is kept."""
        return None if self.dtype is None else jnp.dtype(self.dtype)

    @property
    def max(self) -> float:
        """The limit in force. Raises ValueError for a format without one."""
        if self.dtype not in _DEFAULT_LIMITS:
            raise ValueError(f"a KeyFormat of dtype {self.dtype} has no limit; only float8 ones do")
        return _DEFAULT_LIMITS[self.dtype] if self.limit is None else self.limit


def _up_to_power_of_two(x: Float32[Array, "*B"]) -> Float32[Array, "*B"]:
    """The smallest power of two at or above each positive normal number, by its exponent bits (log2 may round)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    fraction = bits & 0x7FFFFF
    exponent = (bits >> 23) + (fraction != 0).astype(jnp.int32)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def quantise(x: Float[Array, "*B D"], form: KeyFormat) -> tuple[Float[Array, "*B D"], Float32[Array, "*B"]]:
    """float8 values and float32 scales, one a vector: x is about values * scale.

        scale = max(|x|, 1e-4) / limit, rounded up to a power of two if asked;  values = x / scale, clipped, to nearest

    A vector with a NaN or an infinity has no scale: its values are all NaN and its scale is 1, so that its scores are
    NaN and rank last, and no neighbour notices. Raises ValueError if the format is not float8.
    """
    limit, dtype = form.max, form.jax_dtype
    x = x.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(x), -1)  # not of the maximum: some backends' maximum drops a NaN
    amax = jnp.maximum(jnp.max(jnp.where(finite[..., None], jnp.abs(x), 1.0), -1), AMAX_FLOOR)
    # Behind the barrier, because the compiler turns a division by a constant into a multiplication by its rounded
    # reciprocal: another last bit, and for powers of two a scale twice as large.
    scale = amax / lax.optimization_barrier(jnp.full_like(amax, limit))
    scale = _up_to_power_of_two(scale) if form.power_of_two else scale
    values = jnp.clip(x / scale[..., None], -limit, limit)
    values = jnp.where(finite[..., None], values, jnp.nan)
    return values.astype(dtype), jnp.where(finite, scale, 1.0)


def encode_keys(
    keys: Float[Array, "*B D"], form: KeyFormat
) -> tuple[Float[Array, "*B D"], Float32[Array, "*B"] | None]:
    """Index keys as they are cached, and their scales: None unless the format is float8."""
    if form.is_fp8:
        return quantise(keys, form)
    return keys.astype(form.jax_dtype or keys.dtype), None


def encode_queries(
    q: Float[Array, "*B H D"], gates: Float32[Array, "*B H"], form: KeyFormat
) -> tuple[Float[Array, "*B H D"], Float32[Array, "*B H"]]:
    """Index queries as they are multiplied. The scale of each head goes into its gate: ReLU lets positive factors
    pass, so the score needs no further scaling on the query side."""
    if form.is_fp8:
        values, scales = quantise(q, form)
        return values, gates * scales
    return q.astype(form.jax_dtype or q.dtype), gates
