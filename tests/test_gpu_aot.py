"""scripts/check_rocm --gpu-aot: which programs it takes, what it reads off a compiled one, and what it says without the
compiler."""

from types import SimpleNamespace

import pytest

from scripts.lib import gpu_aot
from scripts.lib.check_rocm import main
from scripts.lib.gpu_aot import SCOPE, Unavailable, collectives_of, compile_for_gpu, selection_of, topology_mesh
from scripts.lib.program_list import Listed, listed
from serving import models
from vitbatch.towers import FAMILIES
from vitstripe.platform import Platform

H200 = Platform("cuda", "sm90", "NVIDIA H200")


@pytest.fixture(scope="module")
def chosen(mesh_of):
    """What the rung compiles, listed for eight host devices that pass for H200s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_aot, "platform_of", lambda device: H200)
        return gpu_aot.spmd_programs(mesh_of(8))


def test_every_family_has_each_kind_of_spmd_program_once(chosen, mesh_of):
    groups = " ".join({one.group for one in chosen}).replace(",", "").split()
    assert set(FAMILIES) | set(models.families()) <= set(groups)
    every, _ = listed(mesh_of(8), H200, SCOPE)
    kinds = {(one.group, one.kind) for one in every if any(one.program.collectives.values())}
    assert kinds <= {(one.group, one.kind) for one in chosen}
    collectives = [(one.group, one.kind, tuple(sorted(one.program.collectives.items()))) for one in chosen]
    assert len(set(collectives)) == len(collectives)


HLO = """
  %ar = (s32[8,4]{1,0}, s32[8,4]{1,0}) all-reduce-start(s32[8,4]{1,0} %a, s32[8,4]{1,0} %b), replica_groups={}
  %ag.1 = f32[8,4]{1,0} all-gather(f32[1,4]{1,0} %c), dimensions={0}
  %ag.2 = f32[8,4]{1,0} all-gather(f32[1,4]{1,0} %d), dimensions={0}
  %s = (f32[512,256]{1,0}, s32[512,256]{1,0}) sort(f32[512,256]{1,0} %e, s32[512,256]{1,0} %i), dimensions={1}
"""


def test_collectives_and_sorts_are_read_off_a_compiled_program():
    assert collectives_of(HLO) == {"all_reduce": 1, "all_gather": 2}
    assert selection_of(HLO) == "sort of [512,256]"
    assert selection_of(f'{HLO} name = "select_filter"').startswith("select kernels")


class Program:
    """Compiles to HLO and takes `temporary` bytes."""

    name = "made up"

    def __init__(self, temporary, **collectives):
        self.temporary, self.collectives = temporary, collectives

    def compile(self):
        sizes = {"argument": 100 << 20, "temp": self.temporary, "output": 5, "alias": 5}
        memory = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
        return SimpleNamespace(as_text=lambda: HLO, memory_analysis=lambda: memory)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (Program(80 << 20, all_reduce=3, all_gather=2), ""),  # XLA may join several into one
        (Program(80 << 20, all_reduce=1, all_gather=1), "declared {'all_reduce': 1, 'all_gather': 1}"),
        (Program(80 << 20, all_reduce=1), "declared {'all_reduce': 1}"),
        (Program(15 << 30, all_reduce=1, all_gather=2), "takes 15.0 GiB of temporary memory"),
        (Program(150 << 30, all_reduce=1, all_gather=2), "needs 150 GiB a device"),
    ],
)
def test_what_breaks_a_rule_is_a_problem(program, problem):
    found = " ".join(compile_for_gpu(Listed("serving", "decoder", program)).problems)
    assert problem in found
    assert bool(found) == bool(problem)


def test_without_the_compiler_the_reason_is_said_and_nothing_fails(monkeypatch, capsys, tmp_path):
    broken = tmp_path / "none.bin"
    broken.write_bytes(b"no topology")
    with pytest.raises(Unavailable, match="extra aot"):
        topology_mesh(broken)

    def unavailable():
        raise Unavailable("jax's CUDA plugin is not usable; install the extra aot")

    monkeypatch.setattr(gpu_aot, "topology_mesh", unavailable)
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    assert main(["--gpu-aot"]) == 0
    assert "skipped --gpu-aot: jax's CUDA plugin is not usable; install the extra aot" in capsys.readouterr().out
