"""From a jitted function with Pallas-Triton kernels to AMD machine code, on a machine without an AMD GPU.

JAX lowers the function for ROCm and leaves each kernel as Triton's intermediate representation; the triton package
compiles that for a named architecture. XLA compiles the same representation with a Triton and an LLVM of its own, so
what comes out here is evidence, not the binary that will run. Needs the extra `isa` (and JAX 0.10.2 or newer).
"""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

WAVE = 64  # lanes
SIMDS = 4  # of a compute unit; waves are spread over them
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
"""Shared memory of a compute unit (AMD's instruction set references of CDNA 3 and CDNA 4)."""


@dataclass(frozen=True)
class KernelSource:
    """A kernel as JAX hands it to XLA. ttir: Triton's intermediate representation, as text."""

    name: str
    ttir: str
    warps: int
    stages: int


@dataclass(frozen=True)
class KernelReport:
    """What the compiler says of a kernel. vgprs: vector registers a lane, accumulation registers included. spills:
    registers of either kind that did not fit; scratch: bytes of memory a lane needs for them. lds: bytes of shared
    memory a workgroup. occupancy: waves that fit on a SIMD, by registers and by shared memory. mfma: kinds of matrix
    instructions."""

    name: str
    arch: str
    vgprs: int
    spills: int
    scratch: int
    lds: int
    occupancy: int
    mfma: tuple[str, ...]


def _abstract_gpu(arch: str) -> contextlib.AbstractContextManager[Any]:
    """Tells newer JAX what device a kernel is lowered for; 0.10 needs no telling."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind=arch, num_cores=None, platform="rocm")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def kernel_sources(fn: Callable[..., Any], args: Sequence[Any], arch: str) -> list[KernelSource]:
    """The Pallas-Triton kernels of fn(*args) lowered for a ROCm architecture, in program order."""
    with _abstract_gpu(arch):
        lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("rocm",))
    found = []
    for op in _operations(lowered.compiler_ir("stablehlo").operation):
        if op.name != "stablehlo.custom_call" or "triton" not in str(op.attributes["call_target_name"]):
            continue
        config = ir.DictAttr(op.attributes["mhlo.backend_config"])
        context = mlir.make_ir_context()
        triton_dialect.register_dialect(context)
        with context, ir.Location.unknown():
            module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            text = module.operation.get_asm(enable_debug_info=False)
        found.append(
            KernelSource(
                ir.StringAttr(config["name"]).value,
                text,
                ir.IntegerAttr(config["num_warps"]).value,
                ir.IntegerAttr(config["num_stages"]).value,
            )
        )
    return found


def _number(assembly: str, field: str) -> int:
    return int(re.findall(rf"\.{field}:\s*(\d+)", assembly)[0])


def _simplified(path: Path, target: Any, options: dict[str, Any]) -> str:
    """The first passes over a kernel, which `triton.compile` leaves out for a file and XLA does not: among them those
    that join a product and the sum it is added to."""
    from triton._C.libtriton import ir as triton_ir
    from triton.compiler.compiler import make_backend

    backend, context = make_backend(target), triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    module = triton_ir.parse_mlir_module(str(path), context)
    module.context = context
    return str(backend.make_ttir(module, {}, backend.parse_options(options)))


def compile_kernel(source: KernelSource, arch: str) -> KernelReport:
    """Compiles to machine code for `arch` ("gfx942", "gfx950"). Raises what triton raises."""
    import triton  # of the extra `isa`; nothing else here needs it
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("hip", arch, WAVE)
    options = {"num_warps": source.warps, "num_stages": source.stages, "enable_fp_fusion": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{source.name}.ttir")
        path.write_text(source.ttir)
        path.write_text(_simplified(path, target, options))
        kernel = triton.compile(str(path), target=target, options=options)
    assembly = kernel.asm["amdgcn"]
    lds = kernel.metadata.shared  # dynamic: the field in the assembly is 0
    workgroups = LDS_BYTES[arch] // lds if lds else 64
    occupancy = min(int(re.findall(r"; Occupancy: (\d+)", assembly)[0]), workgroups * source.warps // SIMDS)
    return KernelReport(
        name=source.name,
        arch=arch,
        # The count already holds the accumulation registers.
        vgprs=_number(assembly, "vgpr_count"),
        spills=_number(assembly, "vgpr_spill_count") + _number(assembly, "sgpr_spill_count"),
        scratch=_number(assembly, "private_segment_fixed_size"),
        lds=lds,
        occupancy=occupancy,
        mfma=tuple(sorted(set(re.findall(r"v_mfma_\w+", assembly)))),
    )
