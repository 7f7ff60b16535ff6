"""Which accelerator this is. ROCm devices report their platform as "gpu", like CUDA's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

_Row = TypeVar("_Row")

_HOPPER_MEMORY = ("", "sm90", "sm100", "sm103")
"""CUDA architectures with Hopper's 227 KiB of shared memory a block, an unnamed one among them; others have 163 or 99
(CUDA C++ Programming Guide, technical specifications by compute capability)."""


@dataclass(frozen=True)
class Platform:
    """kind: "cpu", "cuda" or "rocm". arch: "gfx942", "gfx950", ... on ROCm, "sm90", "sm89", ... on CUDA, "" on a CPU
    and where it is not known. name: marketing name."""

    kind: str
    arch: str
    name: str

    @property
    def default_dtype(self):
        """bfloat16 on a GPU, float32 on a CPU."""
        return jnp.float32 if self.kind == "cpu" else jnp.bfloat16

    @property
    def tile_arch(self) -> str:
        """The architecture that kernels' tiles are chosen for: "sm90" on CUDA where Hopper's fit, else `arch`."""
        return "sm90" if self.kind == "cuda" and self.arch in _HOPPER_MEMORY else self.arch

    @property
    def runs_kernels(self) -> bool:
        """Whether Pallas kernels are compiled for this platform at all."""
        return self.kind in ("cuda", "rocm")

    def row_of(self, table: Mapping[str, _Row]) -> _Row:
        """The row of a table by architecture: that of `tile_arch` if listed, else "default"."""
        return table[self.tile_arch] if self.tile_arch in table else table["default"]


PLAIN = Platform("cpu", "", "")
"""Asks a dispatch function for plain XLA, whatever the machine."""


def platform_of(device: jax.Device) -> Platform:
    """Reads the platform of `device`. The compute capability is "gfx..." on ROCm and a number on CUDA."""
    capability = getattr(device, "compute_capability", None)
    arch = capability.split(":")[0] if isinstance(capability, str) and capability.startswith("gfx") else ""
    if device.platform != "gpu":
        return Platform(device.platform, "", device.device_kind)
    if arch or "rocm" in device.client.platform_version.lower():
        return Platform("rocm", arch, device.device_kind)
    arch = f"sm{capability.replace('.', '')}" if isinstance(capability, str) else ""
    return Platform("cuda", arch, device.device_kind)


def default_platform() -> Platform:
    """The platform of the first device: what a function compiles for when nobody says otherwise. Programs lowered for
    another machine name theirs."""
    return platform_of(jax.devices()[0])


def platform_of_mesh(mesh: Mesh | AbstractMesh) -> Platform:
    """The platform of a mesh's devices, which are all alike; of one that has none, the default platform."""
    return platform_of(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else default_platform()
