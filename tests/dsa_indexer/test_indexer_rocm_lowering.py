"""Every program lowers for ROCm from a machine without one, with nothing in it that only another vendor has."""

import re

import jax
import jax.numpy as jnp
import pytest

from dsa_indexer import RowBatch, StripeConfig, sparse_mla, store_keys, striped_topk_rows, topk_paged, topk_rows

M, N, H, D, K, PAGE = 200, 4000, 32, 128, 2048, 64
# Names shard_map uses to mark its edges; the partitioner removes them.
SHARDING = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}


def _abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def _int(*shape):
    return _abstract(*shape, dtype=jnp.int32)


ROWS = (
    _abstract(M, H, D),
    _abstract(M, H, dtype=jnp.float32),
    _abstract(N, D),
    _abstract(N, dtype=jnp.float32),
    RowBatch(_int(M), _int(M), _int(M)),
)
DECODE = (_abstract(5, 1, H, D), _abstract(5, 1, H, dtype=jnp.float32), _abstract(99, PAGE, D), _int(5, 40), _int(5, 1))
LATENT = (_abstract(M, 16, 576), _abstract(N, 576), _int(M, K))


def _striped(merge: str):
    def program(*args):
        # Built when called: the mesh needs the devices that conftest makes.
        mesh = jax.sharding.Mesh(jax.devices()[:8], ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        return striped_topk_rows(*args, k=K, mesh=mesh, stripes=StripeConfig(merge=merge))

    return program


PROGRAMS = {
    "replicated": (lambda *args: topk_rows(*args, k=K), ROWS),
    "striped, pmax": (_striped("pmax"), ROWS),
    "striped, all_gather": (_striped("all_gather"), ROWS),
    "paged": (lambda *args: topk_paged(*args, k=K), DECODE),
    "store": (store_keys, (_abstract(99, PAGE, D), _abstract(M, D), _int(M))),
    "sparse attention": (lambda *args: sparse_mla(*args, scale=0.1, value_dim=512), LATENT),
}


@pytest.mark.multidevice
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_lowers_for_rocm_without_custom_calls(name):
    program, args = PROGRAMS[name]
    text = jax.jit(program).trace(*args).lower(lowering_platforms=("rocm",)).as_text()
    calls = set(re.findall(r"custom_call @([\w.]+)", text)) | set(re.findall(r'call_target_name = "([^"]+)"', text))
    assert calls <= SHARDING
    assert "stablehlo.convolution" not in text
    assert len(re.findall(r"chlo\.top_k", text)) == (0 if name in ("store", "sparse attention") else 1)
