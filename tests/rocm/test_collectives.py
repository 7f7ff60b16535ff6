"""On AMD GPUs: RCCL's collectives, exact and within a time limit, at the sizes the striped indexer sends. `-m rocm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from vitstripe import make_mesh
from vitstripe.selftest import bounded, check_pmax

pytestmark = [
    pytest.mark.rocm,
    pytest.mark.skipif("len(jax.devices()) < 2", reason="NOT MEASURED: needs 2 devices"),
]
SECONDS = 120.0
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("size", [KIB, 32 * KIB, MIB, 16 * MIB, 256 * MIB], ids=lambda size: f"{size // KIB} KiB")
def test_the_int32_maximum_is_exact_on_every_device(size):
    width = min(2048, size // 4)
    check_pmax(make_mesh(len(jax.devices())), rows=size // 4 // width, width=width, seconds=SECONDS)


def test_a_maximum_over_some_of_the_devices_is_exact_too():
    check_pmax(make_mesh(2), rows=1000, width=2048, seconds=SECONDS)


COLLECTIVES = {
    "all_reduce": (lambda x: lax.psum(x, "tp"), PartitionSpec(), lambda x, n: x.sum(0, keepdims=True)),
    "all_gather": (lambda x: lax.all_gather(x, "tp", tiled=True), PartitionSpec(), lambda x, n: x),
    "reduce_scatter": (
        lambda x: lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
        PartitionSpec(None, "tp"),
        lambda x, n: x.sum(0, keepdims=True),
    ),
    "collective_permute": (
        lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % lax.axis_size("tp")) for i in range(lax.axis_size("tp"))]),
        PartitionSpec("tp"),
        lambda x, n: np.roll(x, 1, axis=0),
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_other_collectives_end_in_time_with_exact_whole_numbers(name):
    body, out, wanted = COLLECTIVES[name]
    count = len(jax.devices())
    mesh = make_mesh(count)
    # Whole numbers whose sums float32 holds exactly, so that the order of summation does not matter.
    values = np.random.default_rng(2).integers(-1000, 1000, (count, 24 * count)).astype(np.float32)
    # A gathered result counts as varying, which the checker would refuse.
    mapped = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("tp"), out_specs=out, check_vma=False)
    placed = jax.device_put(jnp.asarray(values), NamedSharding(mesh, PartitionSpec("tp")))
    got = bounded(lambda: np.asarray(jax.jit(mapped)(placed)), SECONDS, f"{name} over {count} devices")
    np.testing.assert_array_equal(got, wanted(values, count))
