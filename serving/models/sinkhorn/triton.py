"""Sinkhorn normalisation as one kernel: Pallas through Triton, the backend that reaches AMD as well as NVIDIA.

A program takes the matrices of 128 tokens, entry by entry: N * N vectors of 128, which stay in registers through all
divisions. A division is then a few instructions a token, with no traffic between threads.
"""

from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32

LARGEST_STREAMS = 4
"""N above which N * N vectors would crowd the registers."""
_ROWS, _WARPS = 128, 4

Matrix = tuple[tuple[Array, ...], ...]


def _divide_rows(c: Matrix, eps: float) -> Matrix:
    sums = [reduce(add, row) + eps for row in c]
    return tuple(tuple(x / total for x in row) for row, total in zip(c, sums, strict=True))


def _divide_columns(c: Matrix, eps: float) -> Matrix:
    return tuple(zip(*_divide_rows(tuple(zip(*c, strict=True)), eps), strict=True))


def _kernel(logits_ref: Any, out_ref: Any, *, tokens: int, streams: int, iterations: int, eps: float):
    token = pl.program_id(0) * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
    real, first = token < tokens, token * streams**2
    entries = range(streams)

    def load(i: int, j: int) -> Array:
        return plt.load(logits_ref.at[first + (i * streams + j)], mask=real, other=0.0)

    rows = []
    for i in entries:
        row = [load(i, j) for j in entries]
        top = reduce(jnp.maximum, row)
        rows.append(tuple(jnp.exp(x - top) for x in row))
    softmax = _divide_rows(tuple(rows), 0.0)
    c = _divide_columns(tuple(tuple(x + eps for x in row) for row in softmax), eps)
    c = lax.fori_loop(0, iterations - 1, lambda _, c: _divide_columns(_divide_rows(c, eps), eps), c)
    for i in entries:
        for j in entries:
            plt.store(out_ref.at[first + (i * streams + j)], c[i][j], mask=real)


def sinkhorn_triton(
    logits: Float32[Array, "T N N"], *, iterations: int, eps: float, interpret: bool = False
) -> Float32[Array, "T N N"]:
    """See `serving.models.sinkhorn.sinkhorn`. interpret: run as plain JAX operations, on any device."""
    tokens, streams, _ = logits.shape
    if tokens == 0:
        return logits
    out = pl.pallas_call(
        partial(_kernel, tokens=tokens, streams=streams, iterations=iterations, eps=eps),
        grid=(-(-tokens // _ROWS),),
        out_shape=jax.ShapeDtypeStruct((logits.size,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="sinkhorn",
    )(logits.reshape(-1))
    return out.reshape(logits.shape)
