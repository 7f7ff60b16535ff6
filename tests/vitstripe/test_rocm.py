"""What is said of an AMD machine, judged on made-up machines."""

import pytest

from vitstripe import rocm

PLUGINS = {"jax-rocm7-plugin": "0.12.0", "jax-rocm7-pjrt": "0.12.0"}
FITTING = {"jax": "0.12.0", "jaxlib": "0.12.0", **PLUGINS}


def texts(found):
    return [f"{finding.level}: {finding.text}" for finding in found]


def test_versions_that_fit_together_give_nothing_to_say():
    assert rocm.check_versions(FITTING) == []
    assert rocm.check_versions({"jax": "0.10.2", "jaxlib": "0.10.2"}) == []
    assert rocm.check_versions({"jax": "0.12.0.1", "jaxlib": "0.12.0", "jax-cuda12-plugin": "0.12.0.1"}) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"jax": "0.12.0.1"}, "jax-rocm7-plugin is 0.12.0, jax is 0.12.0.1"),
        ({"jaxlib": "0.11.2"}, "jaxlib is 0.11.2, jax is 0.12.0"),
        ({"jax-rocm7-pjrt": "0.11.2"}, "jax-rocm7-pjrt is 0.11.2"),
        ({"jax-rocm10-plugin": "0.12.0", "jax-rocm10-pjrt": "0.12.0"}, "rocm10 and rocm7 are installed"),
        ({"jaxlib-rocm": "0.4.6"}, "jaxlib-rocm is of 2023"),
        ({"jax-cuda12-plugin": "0.12.0"}, "uninstall those of the other maker"),
    ],
)
def test_versions_that_do_not_fit_are_named(change, says):
    assert any(says in text for text in texts(rocm.check_versions(FITTING | change)))


def test_half_a_plugin_and_a_generation_too_new_for_jax_are_named():
    half = {name: version for name, version in FITTING.items() if not name.endswith("pjrt")}
    assert any("jax-rocm7-pjrt is not installed" in text for text in texts(rocm.check_versions(half)))
    old = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-rocm10-plugin": "0.10.2", "jax-rocm10-pjrt": "0.10.2"}
    assert texts(rocm.check_versions(old)) == ["problem: jax 0.10.2 does not know rocm10; it does from 0.11.1"]


def test_a_container_s_small_shared_memory_is_a_problem_where_devices_talk():
    (finding,) = rocm.check_shared_memory(64 << 20, devices=8)
    assert finding.level == "problem"
    assert "/dev/shm holds 64 MiB" in finding.text
    assert "--shm-size=64g" in finding.text
    assert rocm.check_shared_memory(64 << 20, devices=1) == []
    assert rocm.check_shared_memory(64 << 30, devices=8) == []


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"HIP_VISIBLE_DEVICES": ""}, "problem: HIP_VISIBLE_DEVICES is empty, which hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "problem: CUDA_VISIBLE_DEVICES=0 on an AMD machine"),
        ({"ROCR_VISIBLE_DEVICES": "0,8"}, "asks for GPU 8; those in this machine are 0 to 7"),
        (
            {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4"},
            "asks for GPU 4; those that ROCR_VISIBLE_DEVICES leaves are 0 to 1",
        ),
    ],
)
def test_variables_that_hide_devices_are_explained(environ, says):
    assert any(says in text for text in texts(rocm.check_visible_devices(environ, present=8)))


def test_sound_visible_devices_and_those_of_a_machine_without_amd_gpus_are_no_problem():
    assert rocm.check_visible_devices({}, present=8) == []
    both = {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1,0"}
    assert [finding.level for finding in rocm.check_visible_devices(both, present=8)] == ["note"]
    assert rocm.check_visible_devices({"CUDA_VISIBLE_DEVICES": "1"}, present=0) == []


@pytest.mark.parametrize(
    ("environ", "level", "says"),
    [
        ({}, "note", "jax takes 75 %"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, "problem", "which jax refuses"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, "warning", "is the old name"),
        ({"XLA_CLIENT_MEM_FRACTION": "90"}, "problem", "no number above 0 and up to 1"),
        ({"XLA_CLIENT_MEM_FRACTION": "most"}, "problem", "no number above 0 and up to 1"),
        ({"XLA_CLIENT_MEM_FRACTION": ".2"}, "warning", "sized from what that leaves"),
        ({"XLA_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "note", "fragments"),
    ],
)
def test_the_memory_fraction_is_judged(environ, level, says):
    assert any(text.startswith(f"{level}: ") and says in text for text in texts(rocm.check_memory(environ)))
    assert rocm.check_memory({"XLA_CLIENT_MEM_FRACTION": "0.9"}) == []


def test_hip_graphs_are_turned_off_once_and_never_against_the_user():
    environ = {"XLA_FLAGS": "--xla_dump_to=/dumps"}
    assert rocm.turn_command_buffers_off(environ)
    assert environ["XLA_FLAGS"] == "--xla_dump_to=/dumps --xla_gpu_enable_command_buffer="
    assert not rocm.turn_command_buffers_off(environ)
    assert rocm.command_buffers(environ) == ""
    wanted = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS"}
    assert not rocm.turn_command_buffers_off(wanted)
    assert rocm.command_buffers(wanted) == "FUSION,CUBLAS"


def test_hip_graphs_that_are_on_are_warned_of():
    assert rocm.check_command_buffers({}, []) == []
    off = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    assert [f.level for f in rocm.check_command_buffers(off, ["gfx950"])] == ["note"]
    (finding,) = rocm.check_command_buffers({}, ["gfx950"])
    assert finding.level == "warning"
    assert "openxla/xla#46952" in finding.text


def test_amd_gpus_are_read_from_the_driver_without_starting_a_backend(tmp_path):
    nodes = {"0": (0, 0), "1": (304, 90402), "2": (256, 90500), "10": (104, 90010)}
    for name, (simds, target) in nodes.items():
        (tmp_path / name).mkdir()
        text = f"cpu_cores_count 0\nsimd_count {simds}\ngfx_target_version {target}\n"
        (tmp_path / name / "properties").write_text(text)
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "properties").write_text("simd_count many\n")
    assert rocm.amd_gpus(tmp_path) == ["gfx942", "gfx950", "gfx90a"]
    assert rocm.amd_gpus(tmp_path / "none") == []


def test_architectures_nobody_checked_and_mixtures_are_told():
    assert rocm.check_archs(["gfx950"] * 8) == []
    levels = {finding.level for finding in rocm.check_archs(["gfx90a", "gfx942"])}
    assert levels == {"problem", "warning"}


def test_gpus_that_jax_does_not_reach_are_a_problem_with_a_reason():
    def says(archs, kinds, versions):
        return texts(rocm.check_reached(archs, kinds, versions))

    assert "no ROCm plugin is installed" in says(["gfx950"] * 8, ["cpu"], {})[0]
    assert "/dev/kfd" in says(["gfx950"], ["cpu"], PLUGINS)[0]
    assert "jax found no GPU" in says([], ["cpu"], {"jax-cuda12-plugin": "0.12.0"})[0]
    assert says(["gfx950"], ["rocm"], PLUGINS) == []
    assert says([], ["cpu"], {}) == []
