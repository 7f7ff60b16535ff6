"""Platforms, told apart on stand-ins for devices that this machine does not have."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from vitstripe.platform import Platform, platform_of


def device(platform: str, kind: str, client: str, capability: str | None) -> Mock:
    stand_in = Mock(spec=jax.Device, platform=platform, device_kind=kind, compute_capability=capability)
    stand_in.client = Mock(platform_version=client)
    return stand_in


@pytest.mark.parametrize(
    ("stand_in", "kind", "arch"),
    [
        (device("gpu", "AMD Instinct MI300X", "PJRT C API\nrocm 70100", "gfx942:sramecc+:xnack-"), "rocm", "gfx942"),
        (device("gpu", "AMD Instinct MI355X", "PJRT C API\nrocm 70100", "gfx950"), "rocm", "gfx950"),
        (device("gpu", "AMD Radeon", "PJRT C API\nROCM 60300", None), "rocm", ""),
        (device("gpu", "NVIDIA H200", "PJRT C API\ncuda 12090", "9.0"), "cuda", "sm90"),
        (device("gpu", "NVIDIA L40S", "PJRT C API\ncuda 12090", "8.9"), "cuda", "sm89"),
        (device("cpu", "cpu", "cpu", None), "cpu", ""),
    ],
)
def test_the_platform_is_told_by_the_capability_and_the_client(stand_in, kind, arch):
    found = platform_of(stand_in)
    assert (found.kind, found.arch, found.name) == (kind, arch, stand_in.device_kind)


def test_the_default_dtype_is_bfloat16_on_a_gpu_and_float32_on_a_cpu():
    assert platform_of(device("gpu", "NVIDIA H200", "cuda", "9.0")).default_dtype == jnp.bfloat16
    assert platform_of(device("gpu", "AMD", "rocm", "gfx950")).default_dtype == jnp.bfloat16
    assert platform_of(jax.devices()[0]).default_dtype == jnp.float32


def test_cuda_devices_with_less_shared_memory_than_hopper_s_do_not_get_its_tiles():
    tiles = {arch: Platform("cuda", arch, "").tile_arch for arch in ("", "sm80", "sm89", "sm90", "sm100", "sm120")}
    assert [arch for arch, taken in tiles.items() if taken == "sm90"] == ["", "sm90", "sm100"]
    assert Platform("rocm", "gfx942", "").tile_arch == "gfx942"
