"""What the doctor finds on made-up machines, and what it sets before jax starts."""

import pytest

from serving.doctor import check_collective, find, installed_versions, prepare_environment, verdict
from vitstripe.platform import Platform

VERSIONS = {"jax": "0.12.0", "jaxlib": "0.12.0", "jax-rocm7-plugin": "0.12.0", "jax-rocm7-pjrt": "0.12.0"}
MI355X = Platform("rocm", "gfx950", "AMD Instinct MI355X")
CPU = Platform("cpu", "", "cpu")
OFF = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", "XLA_CLIENT_MEM_FRACTION": "0.9"}


def test_a_sound_amd_machine_has_no_problem():
    found = find(OFF, ["gfx950"] * 8, [MI355X] * 8, VERSIONS, 64 << 30)
    assert {finding.level for finding in found} == {"note"}


def test_problems_come_first():
    found = find({"CUDA_VISIBLE_DEVICES": "0"}, ["gfx950"] * 8, [MI355X] * 8, VERSIONS, 64 << 20)
    levels = [finding.level for finding in found]
    assert levels == sorted(levels, key=("problem", "warning", "note").index)
    assert levels.count("problem") == 2
    assert any("/dev/shm" in finding.text for finding in found)


def test_the_last_line_says_how_much_is_wrong():
    assert verdict(find(OFF, ["gfx950"] * 8, [MI355X] * 8, VERSIONS, 64 << 30), True).endswith(
        "nothing is wrong with versions, variables and devices"
    )
    found = find({"CUDA_VISIBLE_DEVICES": "0"}, ["gfx950"] * 8, [MI355X] * 8, VERSIONS, 64 << 20)
    assert verdict(found, True) == "in all: 2 problems and 1 warning"
    assert verdict([], False) == "in all: 1 problem"


def test_where_a_container_hides_the_driver_the_devices_tell_the_architecture():
    found = find({}, [], [MI355X] * 2, VERSIONS, 64 << 30)
    assert any("HIP graphs" in finding.text for finding in found)


def test_a_machine_without_a_gpu_has_nothing_to_say():
    assert find({}, [], [CPU] * 8, {"jax": "0.12.0", "jaxlib": "0.12.0"}, 64 << 20) == []


def test_hip_graphs_are_only_set_where_an_amd_gpu_and_its_plugin_are():
    for archs, versions in (([], VERSIONS), (["gfx942"], {"jax": "0.12.0"})):
        environ = {}
        assert prepare_environment(environ, archs, versions) == ""
        assert environ == {}
    assert "HIP graphs are turned off" in prepare_environment(environ, ["gfx942"], VERSIONS)
    assert environ == {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    assert prepare_environment(environ, ["gfx942"], VERSIONS) == ""


def test_the_versions_of_jax_are_found():
    assert {"jax", "jaxlib"} <= installed_versions().keys()
    assert "jaxtyping" not in installed_versions()


@pytest.mark.multidevice
def test_the_start_up_s_own_collective_works_here(mesh_of):
    for tp in (1, 4):
        check_collective(mesh_of(tp))
