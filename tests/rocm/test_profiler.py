"""On an AMD GPU: a trace holds events of every device, and the next computation is fine. `-m rocm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from scripts.lib.trace_scopes import read_section
from vitstripe import make_mesh

pytestmark = pytest.mark.rocm


def test_a_trace_shows_every_device_and_harms_nothing(tmp_path):
    count = len(jax.devices())
    mesh = make_mesh(count)

    def body(x):
        with jax.named_scope("score"):
            y = x @ x.T
        with jax.named_scope("merge"):
            return lax.pmax(y, "tp")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("tp"), out_specs=PartitionSpec())
    x = jax.device_put(np.ones((64 * count, 256), np.float32), NamedSharding(mesh, PartitionSpec("tp")))
    compiled = jax.jit(mapped).lower(x).compile()
    before = np.asarray(compiled(x))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            with jax.profiler.TraceAnnotation("traced"):
                jax.block_until_ready(compiled(x))
    section = read_section(tmp_path, "traced", [compiled], annotation="traced")
    assert len(section.busy) == count, "no device events: see the known faults in docs/rocm.md"
    assert min(section.busy.values()) > 0
    assert section.scopes.get("score", 0) > 0
    np.testing.assert_array_equal(np.asarray(compiled(x)), before)
    assert float(jnp.sum(jnp.ones(1000))) == 1000
