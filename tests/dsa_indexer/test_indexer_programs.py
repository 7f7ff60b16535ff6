"""The list of programs: each lowers for ROCm from a machine without one and holds the collectives it declares."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dsa_indexer import IndexerConfig, IndexerShapes, KeyFormat, LatentShape, StripeConfig, programs
from scripts.lib.rocm_lowering import KERNEL_CALLS, custom_calls_in, kernels_in, lower_for_rocm, rocm_mesh
from vitstripe.platform import Platform

pytestmark = pytest.mark.multidevice

GLM_5_2 = IndexerConfig(
    num_heads=32,
    head_dim=128,
    topk=2048,
    rope_dim=64,
    rope_theta=8e6,
    q_lora_rank=2048,
    hidden_size=6144,
    layer_types=("full", "shared"),
    hadamard=True,
)
DEEPSEEK = replace(GLM_5_2, num_heads=64, rope_interleaved=False, q_lora_rank=1536, hidden_size=7168)
GLM_5_3_FLASH = replace(GLM_5_2, rope_dim=0, q_lora_rank=1536, hidden_size=4096, pool=4)
# 5020 keys a prefill pass can see, more than are selected.
SHAPES = IndexerShapes(
    rows=200, key_pages=251, requests=5, pages=999, page_size=20, pages_per_request=251, rows_per_request=3
)
LATENT = LatentShape(heads=8, width=576, value_dim=512, scale=256**-0.5)

FLOAT8 = {"gfx942": "f8E4M3FNUZ", "gfx950": "f8E4M3FN"}
# Names shard_map uses to mark its edges; the partitioner removes them.

POWER_OF_TWO = KeyFormat.fp8("gfx950", power_of_two=True)

# Which float8 is multiplied follows from the architecture, so the format and the architecture go together.
# scripts/check_rocm --lower lowers every combination.
CASES = {
    "GLM-5.2, bfloat16, gfx942, pmax, 8 devices": (GLM_5_2, KeyFormat(), "gfx942", "pmax", 8),
    "GLM-5.2, bfloat16, gfx950, all_gather, 2 devices": (GLM_5_2, KeyFormat(), "gfx950", "all_gather", 2),
    "DeepSeek-V3.2, float8, gfx950, all_gather, 8 devices": (DEEPSEEK, POWER_OF_TWO, "gfx950", "all_gather", 8),
    "GLM-5.3-Flash, float8, gfx942, pmax, 2 devices": (GLM_5_3_FLASH, KeyFormat.fp8("gfx942"), "gfx942", "pmax", 2),
    "GLM-5.3-Flash, float8, gfx950, one device": (GLM_5_3_FLASH, KeyFormat.fp8("gfx950"), "gfx950", "pmax", 1),
}
SELECT = {"select_guess", "select_filter", "select_repair", "select_pick"}
KERNELS = {name: {"index_scores"} | SELECT for name in ("replicated", "striped", "paged")} | {
    "sparse_mla": {"sparse_mla"}
}
"""The kernels of each program; the others have none."""


def _collectives(text: str) -> Counter:
    return Counter(re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)\b", text))


# One case takes a minute; tests/test_rocm_programs.py lowers a form of each program in the default run.
@pytest.mark.parametrize(
    "case", [case if i == 0 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(CASES)]
)
def test_every_program_lowers_for_rocm_with_its_declared_collectives_and_its_kernels(case):
    config, form, arch, merge, tp = CASES[case]
    mesh, platform = rocm_mesh(tp, arch), Platform("rocm", arch, "")
    stripes = StripeConfig(merge=merge)
    latent = replace(LATENT, form=form)
    found = programs(config, SHAPES, mesh, form=form, stripes=stripes, latent=latent, platform=platform)
    names = [program.name.removeprefix("indexer/") for program in found]
    scales, pools = form.is_fp8, config.pool is not None
    assert names == [
        "project",
        *["store", "gather"],
        *(["store_scales", "gather_scales"] if scales else []),
        *["replicated", *(["striped"] if tp > 1 else []), "paged"],
        *(["expand"] if pools else []),
        "sparse_mla",
    ]
    for name, program in zip(names, found, strict=True):
        text = lower_for_rocm(program, mesh)
        assert _collectives(text) == program.collectives, name
        assert sum(program.collectives.values()) == (name == "striped")
        assert custom_calls_in(text) <= KERNEL_CALLS, name
        assert kernels_in(text) == KERNELS.get(name, set()), name
        assert set(re.findall(r"f8E\w+", text)) <= {FLOAT8[arch]}, name
        assert "stablehlo.convolution" not in text
        assert f"mhlo.num_partitions = {tp}" in text, name


def test_on_a_cpu_no_program_has_a_kernel(mesh_of):
    for program in programs(GLM_5_2, SHAPES, mesh_of(2), latent=LATENT):
        text = program.fn.trace(*program.args).lower().as_text()  # pyright: ignore[reportFunctionMemberAccess]
        assert not kernels_in(text), program.name


def test_on_one_device_there_is_no_striped_program(mesh_of):
    names = {program.name for program in programs(GLM_5_2, SHAPES, mesh_of(1))}
    assert "indexer/replicated" in names
    assert "indexer/striped" not in names


def test_the_programs_fit_together(mesh_of):
    """What one gives out has the shape and dtype that the next takes in."""
    found = {
        program.name.removeprefix("indexer/"): program
        for program in programs(GLM_5_3_FLASH, SHAPES, mesh_of(4), form=KeyFormat.fp8("gfx942"), latent=LATENT)
    }
    out = {name: jax.eval_shape(program.fn, *program.args) for name, program in found.items()}

    def same(given, taken):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), given) == jax.tree.map(lambda x: (x.shape, x.dtype), taken)

    q, gates, keys, key_scales, _, tail = out["project"]
    same((q, gates), found["striped"].args[:2])
    assert (keys.dtype, key_scales.dtype) == (jnp.float8_e4m3fnuz, jnp.float32)
    same(tail, found["project"].args[5])
    same((out["gather"], out["gather_scales"]), found["striped"].args[2:4])
    same(out["striped"], out["replicated"])
    same(out["striped"], found["expand"].args[0])
    same(out["expand"], found["sparse_mla"].args[2])
    assert out["paged"].shape == (5, 3, 512)


def test_compiled_too_only_the_striped_program_has_a_collective(mesh_of):
    config = replace(GLM_5_2, num_heads=2, head_dim=16, topk=5, rope_dim=8, q_lora_rank=12, hidden_size=20)
    shapes = IndexerShapes(rows=9, key_pages=4, requests=2, pages=7, page_size=6, pages_per_request=4)
    started = r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    for program in programs(config, shapes, mesh_of(2), dtype=jnp.float32):
        if program.name.endswith(("replicated", "striped")):
            text = program.compile().as_text()
            assert re.findall(started, text) == (["all-reduce"] if program.collectives else []), program.name


def test_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match=r"IndexerShapes\.requests is 0"):
        replace(SHAPES, requests=0)
