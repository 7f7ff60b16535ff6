"""python -m serving doctor: what this machine has, whether the versions fit together, and whether its devices can talk.

The same checks run when a server starts, where what they find is logged.
"""

import os
import platform
import re
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from vitstripe import rocm
from vitstripe.mesh import make_mesh
from vitstripe.platform import Platform, platform_of
from vitstripe.rocm import LEVELS, Finding
from vitstripe.selftest import CollectiveHang, CollectiveWrong, check_all_gather, check_pmax

_PACKAGES = ("vitstripe", "jax", "jaxlib", "flax", "orbax-checkpoint")
_SHARED_MEMORY = Path("/dev/shm")
_VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_P2P_DISABLE",
)

# Rows x columns of int32: 1 KiB, 1 MiB, and 16 MiB, the merge of a prefill pass of 2048 rows with K = 2048.
_SELF_TEST_SIZES = ((2, 128), (128, 2048), (2048, 2048))


def installed_versions() -> dict[str, str]:
    """Of jax, jaxlib and every accelerator plugin of jax."""
    names = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    pattern = re.compile(r"jax|jaxlib|jaxlib-rocm|jax-(rocm|cuda).*")
    return {name: version for name, version in sorted(names.items()) if name and pattern.fullmatch(name)}


def prepare_environment(
    environ: MutableMapping[str, str], archs: Sequence[str] | None = None, versions: Mapping[str, str] | None = None
) -> str:
    """Sets what must be set before jax starts a backend; returns what was done, "" if nothing was.

    archs: of the AMD GPUs that the driver knows, versions: `installed_versions`; None for this machine's.
    """
    archs = rocm.amd_gpus() if archs is None else archs
    versions = installed_versions() if versions is None else versions
    if not archs or not any(name.startswith("jax-rocm") for name in versions):
        return ""
    if not rocm.turn_command_buffers_off(environ):
        return ""
    return (
        f"HIP graphs are turned off ({rocm.COMMAND_BUFFER_FLAG}= in XLA_FLAGS): they are known to crash on gfx950; say "
        f"in XLA_FLAGS yourself what to capture to have them"
    )


def find(
    environ: Mapping[str, str],
    archs: Sequence[str],
    devices: Sequence[Platform],
    versions: Mapping[str, str],
    shared_memory: int | None,
) -> list[Finding]:
    """Everything that can be said without running anything, problems first. archs: of the AMD GPUs that the driver
    knows; devices: jax's; shared_memory: bytes of /dev/shm, None where there is none."""
    kinds = [device.kind for device in devices]
    found = rocm.check_versions(versions) + rocm.check_reached(archs, kinds, versions)
    found += rocm.check_visible_devices(environ, len(archs))
    if set(kinds) != {"cpu"}:
        found += rocm.check_memory(environ)
        if shared_memory is not None:
            found += rocm.check_shared_memory(shared_memory, len(devices))
    # A container may show jax the GPUs and hide the driver's list of them.
    archs = archs or [device.arch for device in devices if device.kind == "rocm"]
    found += rocm.check_archs(archs) + rocm.check_command_buffers(environ, archs)
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def verdict(found: Sequence[Finding], works: bool) -> str:
    """The doctor's last line. works: what the collective did."""
    counts = {level: sum(finding.level == level for finding in found) for level in LEVELS[:2]}
    counts["problem"] += not works
    told = [f"{n} {level}{'s' * (n > 1)}" for level, n in counts.items() if n]
    return f"in all: {' and '.join(told)}" if told else "in all: nothing is wrong with versions, variables and devices"


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm, None where there is none."""
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None


def find_here() -> list[Finding]:
    """`find` for this machine. Starts jax's backend."""
    devices = [platform_of(device) for device in jax.devices()]
    return find(os.environ, rocm.amd_gpus(), devices, installed_versions(), shared_memory_bytes())


def check_collective(mesh: Mesh) -> None:
    """The start-up's own test of collectives on this mesh. Raises CollectiveHang or CollectiveWrong."""
    if mesh.size > 1:
        rows, width = _SELF_TEST_SIZES[1]
        check_pmax(mesh, rows=rows, width=width, axis=mesh.axis_names[0])
        check_all_gather(mesh, rows=rows, width=width, axis=mesh.axis_names[0])


def _memory(device: jax.Device) -> str:
    stats = device.memory_stats() or {}
    return f"{stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else "not reported"


def _rows(title: str, rows: Sequence[tuple[str, str]], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _self_test(console: Console) -> bool:
    """Prints how long the exact collective takes; False when it hangs or is wrong."""
    count = len(jax.devices())
    if count < 2:
        console.print("one device: no collective to try")
        return True
    for rows, width in _SELF_TEST_SIZES:
        size = rows * width * 4 / 2**20
        try:
            seconds = check_pmax(make_mesh(count), rows=rows, width=width)
        except (CollectiveHang, CollectiveWrong) as error:
            console.print(f"problem: {error}", soft_wrap=True)
            return False
        console.print(f"int32 maximum over {count} devices, {size:.3g} MiB: right on each, {1e3 * seconds:.2f} ms")
    return True


def main() -> int:
    """Prints the tables; 1 when something does not fit."""
    archs, versions = rocm.amd_gpus(), installed_versions()
    prepared = prepare_environment(os.environ, archs, versions)
    console = Console(highlight=False)
    packages = [(name, metadata.version(name)) for name in _PACKAGES]
    plugins = [(name, version) for name, version in versions.items() if name not in _PACKAGES]
    _rows("versions", [("python", platform.python_version()), *packages, *plugins], console)
    devices = Table("device", "platform", "architecture", "memory", "dtype", box=None, padding=(0, 2))
    for device in jax.devices():
        p = platform_of(device)
        devices.add_row(f"{device.id}: {p.name}", p.kind, p.arch or "-", _memory(device), p.default_dtype.__name__)
    console.print(devices)
    shared = shared_memory_bytes()
    machine = [
        ("AMD GPUs of the driver", ", ".join(archs) or "none"),
        ("jax's platform version", jax.devices()[0].client.platform_version.replace("\n", ", ") or "-"),
        ("/dev/shm", "none" if shared is None else f"{shared / 2**30:.1f} GiB"),
        *((name, os.environ[name] or '""') for name in _VARIABLES if name in os.environ),
    ]
    _rows("machine", machine, console)
    if not archs:
        text = "no AMD GPU in this machine: of its variables only those that hide every GPU are looked at"
        console.print(text, soft_wrap=True)
    if prepared:
        console.print(f"note: {prepared}", soft_wrap=True)
    found = find_here()
    for finding in found:
        console.print(f"{finding.level}: {finding.text}", soft_wrap=True)
    works = _self_test(console)
    status = 1 if not works or any(finding.level == "problem" for finding in found) else 0
    console.print(verdict(found, works), soft_wrap=True)
    if not works:
        console.file.flush()
        os._exit(status)  # a thread that hangs in a collective would keep the interpreter from ending
    return status
