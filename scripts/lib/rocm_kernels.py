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
from dsa_indexer.sparse_mla import LatentRows
from dsa_indexer.sparse_mla.triton import sparse_mla_triton
from dsa_indexer.topk.order import ForcedTokens
from dsa_indexer.topk.triton import select_topk_triton
from scripts.lib.amd_isa import LDS_BYTES, KernelReport
from serving.config import ROW_TILE
from serving.models.grouped_matmul.triton import grouped_matmul_triton
from serving.models.paged_attention.triton import paged_attention_triton
from serving.models.sinkhorn.triton import sinkhorn_triton
from vitbatch.attention.triton import attend_triton, attend_windows_triton
from vitbatch.config import ATTENTION_BLOCK
from vitbatch.lanes import Segments
from vitstripe.platform import Platform

ARCHS = tuple(LDS_BYTES)
LEAST_OCCUPANCY = 2

_BF16 = {"gfx942": r"v_mfma_f32_\d+x\d+x\d+_bf16", "gfx950": r"v_mfma_f32_\d+x\d+x\d+_bf16"}
_FP8 = {"gfx942": r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8", "gfx950": r"v_mfma_f32_\d+x\d+x\d+_f8f6f4"}


@dataclass(frozen=True)
class KernelCase:
    """fn(*args) holds the kernels. mfma: a regular expression that each of their matrix instructions must match; None
    where they have none. plain: names of kernels in fn that multiply no matrices beside those that do."""

    name: str
    arch: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mfma: str | None
    plain: tuple[str, ...] = ()


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention(platform: Platform) -> Iterator[KernelCase]:
    heads, mfma = 16, _BF16[platform.arch]
    for label, capacity in (("", 4096), (" of one image", 1024)):
        blocks = _array(capacity // ATTENTION_BLOCK)
        for head_dim in (64, 72, 80, 128):
            x = _array(capacity, heads, head_dim, dtype=jnp.bfloat16)
            fused = _array(capacity, 3 * heads, head_dim, dtype=jnp.bfloat16)
            args = (x, x, fused, Segments(blocks, blocks))
            kernel = partial(attend_triton, platform=platform)
            yield KernelCase(f"attention{label}, head dim {head_dim}", platform.arch, kernel, args, mfma)
            if head_dim == 80:  # Qwen2.5-VL
                windowed = partial(attend_windows_triton, window_patches=64, platform=platform)
                name = f"window attention{label}, head dim {head_dim}"
                yield KernelCase(name, platform.arch, windowed, (*args, _array(capacity)), mfma)


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
            _array(16, 1, 32, dim, dtype=dtype),
            _array(16, 1, 32, dtype=jnp.float32),
            _array(1000, page, dim, dtype=dtype),
            None if label == "bfloat16" else _array(1000, page, dtype=jnp.float32),
            _array(16, keys // page),
            _array(16, 1),
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
    shorter = (_array(1024, 32768, dtype=jnp.float32), *args[1:])
    fn = partial(select_topk_triton, k=2048, platform=platform)
    yield KernelCase("top 2048 of 32768", platform.arch, fn, shorter, None)


def _sparse(platform: Platform) -> Iterator[KernelCase]:
    """Heads of a device of 8, of 4 and of one, of GLM-5.2's 64 and DeepSeek's 128; GLM-5.3's pooled keys add three to a
    selection, and nothing is rotated there."""
    slots, value_dim = 65536, 512
    fn = partial(sparse_mla_triton, scale=0.1, value_dim=value_dim, platform=platform)
    for rows, heads, rope, k in (
        (4096, 8, 64, 2048),
        (4096, 16, 0, 2051),
        (4096, 64, 64, 2048),
        (4096, 128, 64, 2048),
        (64, 8, 64, 2048),
    ):
        q = _array(rows, heads, value_dim + rope, dtype=jnp.bfloat16)
        kv = _array(slots, value_dim + rope, dtype=jnp.bfloat16)
        latents = LatentRows(
            _array(slots, value_dim, dtype=KeyFormat.fp8(platform.arch).jax_dtype),
            _array(slots, dtype=jnp.float32),
            _array(slots, rope, dtype=jnp.bfloat16) if rope else None,
        )
        for label, cached in (("", kv), (", float8", latents)):
            name = f"sparse attention{label}, {rows} rows, {heads} heads, {k} keys"
            yield KernelCase(name, platform.arch, fn, (q, cached, _array(rows, k)), _BF16[platform.arch])


def _paged(platform: Platform) -> Iterator[KernelCase]:
    """A decode and an extend pass, with query and key heads of Qwen3-VL (2B, 8B, 32B, 235B), heads of 64, and those of
    Qwen3.5 (9B, 35B-A3B)."""
    pages = 1024
    for heads, kv_heads, head_dim, page, width in (
        (16, 8, 128, 64, 128),
        (32, 8, 128, 64, 128),
        (64, 8, 128, 64, 128),
        (64, 4, 128, 64, 128),
        (32, 8, 128, 16, 128),
        (32, 8, 128, 64, 2048),
        (16, 4, 64, 64, 128),
        (16, 4, 256, 64, 128),
        (16, 2, 256, 64, 128),
    ):
        for rows, tile_rows, name in ((64, 1, "decode"), (512, ROW_TILE, "extend")):
            cache = _array(pages, page, kv_heads, head_dim, dtype=jnp.bfloat16)
            q = _array(rows, heads, head_dim, dtype=jnp.bfloat16)
            args = (q, cache, cache, _array(rows), _array(rows // tile_rows), _array(64, width), _array(kv_heads))
            fn = partial(paged_attention_triton, scale=head_dim**-0.5, platform=platform)
            label = f"paged {name}, {heads} heads on {kv_heads} of {head_dim}, {width} pages of {page}"
            yield KernelCase(label, platform.arch, fn, args, _BF16[platform.arch], plain=("paged_combine",))


def _hyper(platform: Platform) -> Iterator[KernelCase]:
    """The four streams of GLM-5.3-Flash."""
    fn = partial(sinkhorn_triton, iterations=20, eps=1e-6)
    yield KernelCase("sinkhorn", platform.arch, fn, (_array(8192, 4, 4, dtype=jnp.float32),), None)


def _experts(platform: Platform) -> Iterator[KernelCase]:
    """Experts of GLM-5.3-Flash dealt over 8 devices, up and down, in a decode, a short and a long prefill; and a width
    that no tile divides."""
    for rows, experts, outputs, inputs in (
        (512, 36, 2048, 4096),
        (4096, 36, 2048, 4096),
        (65536, 36, 2048, 4096),
        (65536, 36, 4096, 2048),
        (4096, 16, 4096, 1416),
    ):
        x, w = _array(rows // 8, inputs, dtype=jnp.bfloat16), _array(experts, outputs, inputs, dtype=jnp.bfloat16)
        name = f"experts, {rows} rows, {experts} of {outputs} x {inputs}"
        fn = partial(grouped_matmul_triton, spread=8 * experts, platform=platform)
        yield KernelCase(name, platform.arch, fn, (x, w, _array(experts), _array(rows)), _BF16[platform.arch])


def kernel_cases(arch: str) -> list[KernelCase]:
    platform = Platform("rocm", arch, arch)
    return [
        *_attention(platform),
        *_scores(platform),
        *_selection(platform),
        *_sparse(platform),
        *_paged(platform),
        *_hyper(platform),
        *_experts(platform),
    ]


def problems(case: KernelCase, report: KernelReport) -> list[str]:
    """What is wrong with the machine code of a kernel of `case`, in words; empty if nothing is."""
    found = []
    if report.spills or report.scratch:
        found.append(f"{report.spills} registers spilled, {report.scratch} bytes of scratch memory")
    if report.lds > LDS_BYTES[case.arch]:
        found.append(f"{report.lds} bytes of shared memory, {case.arch} has {LDS_BYTES[case.arch]}")
    if report.occupancy < LEAST_OCCUPANCY:
        found.append(f"{report.occupancy} wave a SIMD, at least {LEAST_OCCUPANCY} hide latencies")
    if case.mfma is None or report.name in case.plain:
        return found
    if not report.mfma:
        found.append(f"no matrix instruction, expected {case.mfma}")
    found.extend(f"{kind}, expected {case.mfma}" for kind in report.mfma if not re.fullmatch(case.mfma, kind))
    return found
