"""Compiles the SPMD programs with XLA's GPU pipeline for eight devices, on a machine without a GPU.

The devices come from a topology that was read off a real card (tests/data/topology), and the compiler is the one in
jax's CUDA plugin: AMD's has no way to compile without its driver. What comes out says what the partitioner and the GPU
passes made of a program (memory a device, collectives, what top-k became); it says nothing of AMD's own passes or of
speed. Needs the extra `aot`.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from rich.table import Table

from scripts.lib.program_list import Listed, Scope, listed
from scripts.lib.rocm_lowering import words
from vitbatch.config import Bucket
from vitstripe.platform import platform_of

TOPOLOGY = Path(__file__).parents[2] / "tests" / "data" / "topology" / "h200_x8.bin"
"""Eight NVIDIA H200, by jax 0.11.2 on such a card."""

SCOPE = Scope(buckets=(Bucket(4096),), every_input=False)
_MEMORY = 141 << 30  # bytes, of the topology's device
# Bytes. No program of the list comes near it; a ragged_dot that XLA spreads over every expert takes 14.5 GiB.
_TEMPORARY = 1 << 30

_HLO = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "collective_permute": "collective-permute",
}

Advance = Callable[[int, int, str], None]
"""Called with (programs compiled, programs in all, what is next)."""


class Unavailable(RuntimeError):  # noqa: N818  (named for what is wrong)
    """The compiler is not there; the text says what to install."""


def prepare_environment() -> None:
    """What XLA and the plugin read from the environment. Call before jax starts its first backend."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to ask for its version
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Autotuning would run kernels.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()


def topology_mesh(file: Path = TOPOLOGY) -> Mesh:
    """The topology's eight devices as a mesh with one Auto axis "tp". Raises Unavailable where jax's CUDA plugin is
    missing or does not start."""
    if not hasattr(topologies.TopologyDescription, "deserialize"):
        raise Unavailable(f"jax {jax.__version__} cannot read a topology from a file; 0.11.2 and newer can (extra aot)")
    # Making any topology is what loads the plugin; this one may fail on its own account.
    with contextlib.suppress(Exception):
        topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x8", target_config="")
    try:
        devices = topologies.TopologyDescription.deserialize(file.read_bytes()).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise Unavailable(f"jax's CUDA plugin is not usable ({reason}); install the extra aot") from error
    return Mesh(np.array(devices), ("tp",), axis_types=(AxisType.Auto,))


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program. Bytes are those of one device; collectives as in the compiled program.
    selection: what became of top-k, "" where there is none."""

    group: str
    name: str
    seconds: float
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    collectives: dict[str, int]
    selection: str
    problems: tuple[str, ...]

    @property
    def collectives_text(self) -> str:
        return words(self.collectives)


def spmd_programs(mesh: Mesh, scope: Scope = SCOPE) -> list[Listed]:
    """One program of each kind that holds a collective or selects keys, the largest of its kind."""
    found, _ = listed(mesh, platform_of(mesh.devices.flat[0]), scope)
    chosen: dict[tuple[str, str, tuple[str, ...]], Listed] = {}
    for one in found:
        collectives = tuple(sorted(f"{n} {name}" for name, n in one.program.collectives.items() if n))
        if collectives or one.kind in ("indexer/replicated", "indexer/paged"):
            chosen[one.group, one.kind, collectives] = one
    return list(chosen.values())


def collectives_of(hlo: str) -> dict[str, int]:
    """Collectives of a compiled program's text, under their StableHLO names."""
    found = re.findall(rf"= [^=]*? ({'|'.join(_HLO.values())})(?:-start)?\(", hlo)
    return {name: found.count(hlo_name) for name, hlo_name in _HLO.items() if hlo_name in found}


def selection_of(hlo: str) -> str:
    """What orders or selects in a compiled program: this project's kernels, XLA's top-k kernel, sorts with their shape
    (a router's and a sampler's among them), or bit-by-bit searches, which leave nothing to name."""
    found = []
    if "select_filter" in hlo:
        found.append("select kernels")
    if "__gpu$TopK" in hlo:
        found.append("XLA's top-k kernel")
    sorted_shapes = re.findall(r"= \(?\w+\[([\d,]+)\][^=]*? (?:sort\(|custom-call\([^\n]*__cub\$)", hlo)
    found += [f"sort of [{shape}]" for shape in dict.fromkeys(sorted_shapes)]
    return ", ".join(found)


def compile_for_gpu(one: Listed) -> Compiled:
    """Compiles a program ahead of time for the devices its arguments are placed on."""
    begin = time.perf_counter()
    compiled = one.program.compile()
    seconds = time.perf_counter() - begin
    hlo, memory = compiled.as_text() or "", compiled.memory_analysis()
    collectives = collectives_of(hlo)
    declared = {name: n for name, n in one.program.collectives.items() if n}
    problems = []
    # The combiner may join several into one; it makes no other kind.
    if collectives.keys() != declared.keys() or any(n > declared[name] for name, n in collectives.items()):
        problems.append(f"collectives are {collectives}, declared {declared}")
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    if held - memory.alias_size_in_bytes > _MEMORY:
        problems.append(f"needs {held / 2**30:.0f} GiB a device")
    if memory.temp_size_in_bytes > _TEMPORARY:
        problems.append(f"takes {memory.temp_size_in_bytes / 2**30:.1f} GiB of temporary memory a device")
    return Compiled(
        one.group,
        one.program.name,
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        collectives,
        selection_of(hlo),
        tuple(problems),
    )


def check_aot(
    mesh: Mesh, scope: Scope = SCOPE, advance: Advance = lambda done, total, what: None
) -> Iterator[Compiled]:
    """Compiles every SPMD program for the mesh. One that fails is yielded with what was raised as its problem."""
    programs = spmd_programs(mesh, scope)
    for done, one in enumerate(programs):
        advance(done, len(programs), f"{one.group}, {one.program.name}")
        try:
            yield compile_for_gpu(one)
        except Exception as error:  # one program that does not compile must not hide the others
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            yield Compiled(one.group, one.program.name, 0.0, 0, 0, 0, {}, "", (reason,))


def table_of(compiled: list[Compiled]) -> Table:
    table = Table(title="compiled by XLA's GPU pipeline for 8 devices, not run (CUDA's compiler)", title_justify="left")
    numbers = ("arguments", "temporary", "outputs")
    for column in ("model", "program", *numbers, "collectives", "selection", ""):
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for c in compiled:
        sizes = (f"{n / 2**20:,.0f} MiB" for n in (c.argument_bytes, c.temporary_bytes, c.output_bytes))
        wrong = f"{len(c.problems)} problems" if c.problems else "ok"
        table.add_row(c.group, c.name, *sizes, c.collectives_text, c.selection or "-", wrong)
    return table
