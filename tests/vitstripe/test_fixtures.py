"""The suite's own fixtures, since every other test leans on them."""

import jax
import jax.numpy as jnp
import numpy as np


def test_the_suite_runs_on_eight_host_devices_with_exact_matmuls():
    assert [d.platform for d in jax.devices()] == ["cpu"] * 8
    assert jax.config.jax_default_matmul_precision == "highest"


def test_mesh_of_takes_the_first_devices(mesh_of):
    assert mesh_of(3).shape == {"tp": 3}
    assert list(mesh_of(3).devices) == jax.devices()[:3]


def test_compile_counter_counts_a_new_shape_once(compile_counter):
    double = jax.jit(lambda x: x * 2.5)
    first, second = np.ones(5, np.float32), np.ones(7, np.float32)
    double(first)
    with compile_counter() as compiles:
        double(first)
        assert compiles.count == 0
        double(second)
        double(second)
    assert compiles.count == 1
    jnp.sin(np.ones(11, np.float32))
    assert compiles.count == 1, "the listener outlived its block"


def test_det_is_the_generator_the_goldens_were_made_with(det):
    values = det((2, 3), seed=5)
    assert values.dtype == np.float32
    assert values.shape == (2, 3)
    assert det((2, 3), seed=5).tobytes() == values.tobytes()
