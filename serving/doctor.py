"""python -m serving doctor: what this machine has, and whether the versions fit together."""

import platform
from importlib import metadata

import jax
from rich.console import Console
from rich.table import Table

from vitstripe.platform import platform_of

_PACKAGES = ("vitstripe", "jax", "jaxlib", "flax", "orbax-checkpoint")


def plugins() -> dict[str, str]:
    """Installed accelerator plugins of jax and their versions."""
    names = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {n: v for n, v in sorted(names.items()) if n and n.startswith(("jax-rocm", "jax-cuda"))}


def plugin_problems(jax_version: str, found: dict[str, str]) -> list[str]:
    """What does not fit: jax itself checks no version of its ROCm plugins, and another one loads silently."""
    return [
        f"{name} is {version}, jax is {jax_version}: install the same version of both"
        for name, version in found.items()
        if name.startswith("jax-rocm") and version != jax_version
    ]


def _memory(device: jax.Device) -> str:
    stats = device.memory_stats() or {}
    return f"{stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else "not reported"


def main() -> int:
    """Prints the tables; 1 when something does not fit."""
    console = Console(highlight=False)
    versions = Table(show_header=False, box=None, padding=(0, 2))
    versions.add_row("python", platform.python_version())
    for name in _PACKAGES:
        versions.add_row(name, metadata.version(name))
    found = plugins()
    for name, version in found.items():
        versions.add_row(name, version)
    console.print(versions)
    devices = Table("device", "platform", "architecture", "memory", "dtype", box=None, padding=(0, 2))
    for device in jax.devices():
        p = platform_of(device)
        devices.add_row(f"{device.id}: {p.name}", p.kind, p.arch or "-", _memory(device), p.default_dtype.__name__)
    console.print(devices)
    problems = plugin_problems(metadata.version("jax"), found)
    if jax.devices()[0].platform == "cpu" and found:
        problems.append("a GPU plugin is installed but jax found no GPU: see the drivers and the visible devices")
    for problem in problems:
        console.print(f"problem: {problem}")
    return 1 if problems else 0
