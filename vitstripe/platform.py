"""Which accelerator this is. ROCm devices report their platform as "gpu", like CUDA's."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


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
