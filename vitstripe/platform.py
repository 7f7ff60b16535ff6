"""Which accelerator this is. ROCm devices report their platform as "gpu", like CUDA's."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh


@dataclass(frozen=True)
class Platform:
    """kind: "cpu", "cuda" or "rocm". arch: "gfx942", "gfx950", ... on ROCm, "" elsewhere. name: marketing name."""

    kind: str
    arch: str
    name: str

    @property
    def default_dtype(self):
        """bfloat16 on a GPU, float32 on a CPU."""
        return jnp.float32 if self.kind == "cpu" else jnp.bfloat16


def platform_of(device: jax.Device) -> Platform:
    """Reads the platform of `device`. The compute capability is "gfx..." on ROCm and a number on CUDA."""
    capability = getattr(device, "compute_capability", None)
    arch = capability.split(":")[0] if isinstance(capability, str) and capability.startswith("gfx") else ""
    if device.platform != "gpu":
        return Platform(device.platform, "", device.device_kind)
    is_rocm = bool(arch) or "rocm" in device.client.platform_version.lower()
    return Platform("rocm" if is_rocm else "cuda", arch, device.device_kind)


def default_platform() -> Platform:
    """The platform of the first device: what a function compiles for when nobody says otherwise. Programs lowered for
    another machine name theirs."""
    return platform_of(jax.devices()[0])


def platform_of_mesh(mesh: Mesh | AbstractMesh) -> Platform:
    """The platform of a mesh's devices, which are all alike; of one that has none, the default platform."""
    return platform_of(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else default_platform()
