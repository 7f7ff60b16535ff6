"""A program, once compiled, either fits a call or raises; it never compiles again."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vitstripe import Program, collectives_in


def shifted_sum(mesh, length: int) -> Program:
    sharding = NamedSharding(mesh, PartitionSpec("tp"))

    def local(x):
        return jax.lax.psum(x.sum(), "tp") + 0.5

    fn = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("tp"), out_specs=PartitionSpec()))
    return Program(
        f"sum/{length}", fn, (jax.ShapeDtypeStruct((length,), np.float32, sharding=sharding),), {"all_reduce": 1}
    )


@pytest.mark.multidevice
def test_a_compiled_program_serves_its_arguments_without_compiling_again(mesh_of, det, compile_counter):
    mesh = mesh_of(3)
    program = shifted_sum(mesh, 21)
    compiled = program.compile()
    x = jax.device_put(det((21,), 7), NamedSharding(mesh, PartitionSpec("tp")))
    with compile_counter() as compiles:
        result = jax.device_get(compiled(x))
    assert compiles.count == 0
    np.testing.assert_allclose(result, det((21,), 7).sum(dtype=np.float64) + 0.5, rtol=1e-6)


@pytest.mark.multidevice
def test_another_shape_or_dtype_raises_instead_of_compiling(mesh_of, det, compile_counter):
    mesh = mesh_of(3)
    compiled = shifted_sum(mesh, 21).compile()
    place = NamedSharding(mesh, PartitionSpec("tp"))
    for wrong in (det((24,), 1), det((21,), 1).astype(np.float16)):
        x = jax.device_put(wrong, place)
        with compile_counter() as compiles, pytest.raises(TypeError):
            compiled(x)
        assert compiles.count == 0


@pytest.mark.multidevice
def test_the_lowered_program_holds_the_collectives_it_declares(mesh_of):
    program = shifted_sum(mesh_of(4), 20)
    text = program.lower().as_text()
    assert {name: text.count(f"stablehlo.{name}") for name in program.collectives} == program.collectives


def test_collectives_are_counted_once_a_call_of_the_function_that_holds_them(mesh_of):
    inner = jax.jit(lambda x: jax.lax.psum(x, "tp"))  # lowered under a quoted name

    def body(x):
        return jax.lax.all_gather(inner(inner(inner(x) + 1) * 2), "tp")

    fn = jax.jit(
        jax.shard_map(body, mesh=mesh_of(2), in_specs=PartitionSpec("tp"), out_specs=PartitionSpec(), check_vma=False)
    )
    text = fn.lower(np.ones(6, np.float32)).as_text()
    assert collectives_in(text) == {"all_reduce": 3, "all_gather": 1}
