"""Every kernel in every shape and tile in use on ROCm, and what its machine code must look like."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dsa_indexer.quant import KeyFormat
from dsa_indexer.scores.triton import paged_scores_triton, row_scores_triton
from dsa_indexer.topk.order import ForcedTokens
from dsa_indexer.topk.triton import select_topk_triton
from scripts.lib.amd_isa import LDS_BYTES, KernelReport
from vitbatch.attention.triton import attend_triton, attend_windows_triton
from vitbatch.lanes import Segments
from vitstripe.platform import Platform

ARCHS = tuple(LDS_BYTES)
LEAST_OCCUPANCY = 2

_BF16 = {"gfx942": r"v_mfma_f32_\d+x\d+x\d+_bf16", "gfx950": r"v_mfma_f32_\d+x\d+x\d+_bf16"}
_FP8 = {"gfx942": r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8", "gfx950": r"v_mfma_f32_\d+x\d+x\d+_f8f6f4"}


@dataclass(frozen=True)
class KernelCase:
    """fn(*args) holds the kernels. mfma: a regular expression that each of their matrix instructions must match; None
    where they have none."""

    name: str
    arch: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mfma: str | None


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention(platform: Platform) -> Iterator[KernelCase]:
    capacity, heads = 4096, 16
    blocks = _array(capacity // 64)
    for head_dim in (64, 72, 80, 128):
        x = _array(capacity, heads, head_dim, dtype=jnp.bfloat16)
        args = (x, x, x, Segments(blocks, blocks))
        mfma = _BF16[platform.arch]
        yield KernelCase(
            f"attention, head dim {head_dim}", platform.arch, partial(attend_triton, platform=platform), args, mfma
        )
        if head_dim == 80:  # Qwen2.5-VL
            windowed = partial(attend_windows_triton, window_patches=64, platform=platform)
            yield KernelCase(
                f"window attention, head dim {head_dim}", platform.arch, windowed, (*args, _array(capacity)), mfma
            )


def _scores(platform: Platform) -> Iterator[KernelCase]:
    rows, keys, dim, page = 1024, 32768, 128, 64
    fp8 = KeyFormat.fp8(platform.arch).jax_dtype
    for label, dtype, mfma in (("bfloat16", jnp.bfloat16, _BF16), ("float8", fp8, _FP8)):
        for heads in (32, 64):
            for num_keys in (keys, keys - 1):
                scales = None if label == "bfloat16" else _array(num_keys, dtype=jnp.float32)
                args = (
                    _array(rows, heads, dim, dtype=dtype),
                    _array(rows, heads, dtype=jnp.float32),
                    _array(num_keys, dim, dtype=dtype),
                    scales,
                    _array(rows),
                    _array(rows),
                )
                name = f"scores, {label}, {heads} heads, {num_keys} keys"
                yield KernelCase(
                    name, platform.arch, partial(row_scores_triton, platform=platform), args, mfma[platform.arch]
                )
        args = (
            _array(4, 32, dim, dtype=dtype),
            _array(4, 32, dtype=jnp.float32),
            _array(1000, page, dim, dtype=dtype),
            None if label == "bfloat16" else _array(1000, page, dtype=jnp.float32),
            _array(keys // page),
            _array(4),
        )
        yield KernelCase(
            f"paged scores, {label}",
            platform.arch,
            partial(paged_scores_triton, platform=platform),
            args,
            mfma[platform.arch],
        )


def _selection(platform: Platform) -> Iterator[KernelCase]:
    args = (_array(1024, 131072, dtype=jnp.float32), _array(1024), _array(1024))
    for k in (512, 1024, 2048):
        fn = partial(select_topk_triton, k=k, platform=platform)
        yield KernelCase(f"top {k}", platform.arch, fn, args, None)
    fn = partial(select_topk_triton, k=2048, forced=ForcedTokens(4, 16), platform=platform)
    yield KernelCase("top 2048, some forced", platform.arch, fn, args, None)


def kernel_cases(arch: str) -> list[KernelCase]:
    platform = Platform("rocm", arch, arch)
    return [*_attention(platform), *_scores(platform), *_selection(platform)]


def problems(case: KernelCase, report: KernelReport) -> list[str]:
    """What is wrong with the machine code of a kernel of `case`, in words; empty if nothing is."""
    found = []
    if report.spills or report.scratch:
        found.append(f"{report.spills} registers spilled, {report.scratch} bytes of scratch memory")
    if report.lds > LDS_BYTES[case.arch]:
        found.append(f"{report.lds} bytes of shared memory, {case.arch} has {LDS_BYTES[case.arch]}")
    if report.occupancy < LEAST_OCCUPANCY:
        found.append(f"{report.occupancy} wave a SIMD, at least {LEAST_OCCUPANCY} hide latencies")
    if case.mfma is None:
        return found
    if not report.mfma:
        found.append(f"no matrix instruction, expected {case.mfma}")
    found.extend(f"{kind}, expected {case.mfma}" for kind in report.mfma if not re.fullmatch(case.mfma, kind))
    return found
