"""The list of every device program and its lowering for ROCm: complete, and any fault in it is told."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from scripts.lib import program_list, rocm_lowering
from scripts.lib.program_list import Scope, listed, program_sites, reached_sites, unreached
from scripts.lib.rocm_lowering import ARCHS, MESHES, check_lowering, examine, lower_for_rocm, rocm_mesh
from serving import models
from vitbatch.config import TINY_BLOCK, Bucket
from vitbatch.towers import FAMILIES
from vitstripe import Program
from vitstripe.platform import Platform

FAST = Scope(buckets=(Bucket(256, TINY_BLOCK), Bucket(512)), every_input=False, prefill_tokens=64, max_seqs=1)


def every_program_lowers(archs, meshes, scope=None):
    report = check_lowering(archs, meshes, scope)
    assert report.missing == []
    assert {f"{line.group}, {line.kind}": line.problems for line in report.lines if line.problems} == {}
    assert report.float8 == {arch: ["f8E4M3FNUZ" if arch == "gfx942" else "f8E4M3FN"] for arch in archs}


def test_every_program_lowers_for_rocm_as_declared():
    every_program_lowers(["gfx950"], [8], FAST)


@pytest.mark.slow
def test_every_program_lowers_for_both_architectures_on_every_mesh_at_several_sizes():
    every_program_lowers(ARCHS, MESHES)


def test_the_list_holds_every_registered_family_and_every_place_that_makes_a_program():
    with reached_sites() as reached:
        found, missing = listed(rocm_mesh(2, "gfx950"), Platform("rocm", "gfx950", ""), FAST)
    assert missing == []
    assert unreached(reached) == []
    groups = " ".join(one.group for one in found).replace(",", "").split()
    assert set(FAMILIES) <= set(groups)
    assert set(models.families()) <= set(groups)
    kinds = {one.kind for one in found}
    assert {"vision", "splice", "extend/striped", "extend/replicated", "decode", "indexer/striped"} <= kinds


def test_a_family_without_sizes_and_a_program_off_the_list_are_missing(monkeypatch):
    monkeypatch.setitem(FAMILIES, "new_vl", object())
    _, missing = listed(rocm_mesh(1, "gfx950"), Platform("rocm", "gfx950", ""), FAST)
    assert missing == ["new_vl: registered, but scripts/lib/model_sizes.py has no sizes for it"]
    with reached_sites() as reached:
        pass
    assert len(unreached(reached)) == len(program_sites()) > 3


@pytest.fixture
def program():
    """maker(body, **fields): a program of one float32 argument on 2 gfx950 devices, split over them."""
    mesh = rocm_mesh(2, "gfx950")
    over_devices = PartitionSpec("tp")
    split = NamedSharding(mesh, over_devices)

    def make(body, out=over_devices, **fields):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=over_devices, out_specs=out, check_vma=False)
        args = (jax.ShapeDtypeStruct((6, 32), jnp.float32, sharding=split),)
        return Program("made up/6", jax.jit(mapped), args, **fields)

    return mesh, make


def problems_of(program, mesh, kind="made up", tp=2, arch="gfx950"):
    return examine(lower_for_rocm(program, mesh), program, kind, tp, arch).problems


def test_a_program_as_declared_has_no_problem(program):
    mesh, make = program
    assert problems_of(make(lambda x: 2 * x), mesh) == ()
    summed = make(lambda x: jax.lax.psum(x, "tp"), PartitionSpec(), collectives={"all_reduce": 1})
    assert problems_of(summed, mesh) == ()


def test_each_fault_of_a_program_is_told(program):
    mesh, make = program
    (text,) = problems_of(make(lambda x: jax.lax.psum(x, "tp"), PartitionSpec()), mesh)
    assert text == "collectives are {'all_reduce': 1}, declared {}"
    (text,) = problems_of(make(lambda x: 2 * x), mesh, tp=8)
    assert text == "partitioned for 2 devices, not 8"

    half = make(lambda x: x.astype(jnp.float8_e4m3fnuz).astype(jnp.float32))
    assert problems_of(half, mesh) == ("float8 of kind f8E4M3FNUZ; gfx950 multiplies f8E4M3FN",)
    assert problems_of(half, mesh, arch="gfx942") == ()
    (text,) = problems_of(make(lambda x: jax.lax.approx_max_k(x, 4)[0]), mesh)
    assert text == "custom calls that ROCm may lack: ApproxTopK"
    (text,) = problems_of(make(lambda x: 2 * x), mesh, kind="indexer/sparse_mla")
    assert text == "runs as plain XLA, without sparse_mla"


def test_a_program_that_cannot_be_lowered_is_a_problem_of_its_line(program, monkeypatch):
    _, make = program

    def calls_back(x):
        return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    one = program_list.Listed("serving", "engine", make(calls_back))
    monkeypatch.setattr(rocm_lowering, "listed", lambda mesh, platform, scope: ([one], []))
    report = check_lowering(["gfx950"], [2])
    (line,) = report.lines
    assert line.problems
    assert report.failed > 0
