"""exp2 as attention kernels need it: of scaled scores less their peak."""

import struct
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from vitstripe.platform import Platform

Exp2 = Callable[[jax.Array, float, jax.Array], jax.Array]
"""(scores, scale, peak) -> 2 ** (scores * scale - peak), float32."""


def _on_cuda(scores: jax.Array, scale: float, peak: jax.Array) -> jax.Array:
    """Two instructions a value.

    XLA neither contracts a product and a sum, nor leaves out the rescaling that keeps subnormal results of exp2 exact:
    seven instructions, in the loop that decides a kernel's speed. Weights below 2^-126 of the largest become 0 here.
    """
    factor = struct.pack(">f", scale).hex()
    asm = f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{factor}, $2; ex2.approx.ftz.f32 $0, t; }}"
    [weights] = plt.elementwise_inline_asm(
        asm,
        args=[scores, jnp.broadcast_to(-peak, scores.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)],
    )
    return weights


def _anywhere(scores: jax.Array, scale: float, peak: jax.Array) -> jax.Array:
    return jnp.exp2(scores * scale - peak)


def exp2_for(platform: Platform, *, interpret: bool) -> Exp2:
    """The form for kernels compiled for `platform`, or interpreted."""
    return _on_cuda if platform.kind == "cuda" and not interpret else _anywhere
