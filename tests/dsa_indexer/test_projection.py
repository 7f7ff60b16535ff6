"""Rows cut before the query projection: each device projects its own, and the selection has the replicated bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import RowBatch, StripeConfig, project_rows, striped_topk_projected, topk_rows
from dsa_indexer.projection import PROJECTION_ROWS
from tests.dsa_indexer import oracle
from tests.dsa_indexer.batches import every_copy
from vitstripe.nn import linear, rotate_pairs

pytestmark = pytest.mark.usefixtures("fully_optimised")

M, N, RANK, H, D, R, K = 201, 300, 48, 4, 24, 8, 17


@pytest.fixture(scope="module")
def case():
    """Arrays of M tokens, a projection of them as an indexer has it, keys and rows."""
    rng = np.random.default_rng(0)
    wq, wg, q_lora, x, keys = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((H * D, RANK), (H, RANK), (M, RANK), (M, RANK), (N, D))
    )
    angle = jnp.asarray(rng.normal(size=(M, R // 2)), jnp.float32)

    def project(x, q_lora, cos, sin):
        q = linear(q_lora, wq).reshape(-1, H, D)
        rotated = rotate_pairs(q[..., :R], cos[:, None], sin[:, None])
        return jnp.concatenate([rotated, q[..., R:]], -1), linear(x, wg)

    rows = RowBatch(jnp.zeros(M, jnp.int32), jnp.arange(100, 100 + M, dtype=jnp.int32))
    return project, (x, q_lora, jnp.cos(angle), jnp.sin(angle)), keys, rows


def test_a_projected_row_has_the_same_bits_wherever_it_lies(case):
    project, inputs, *_ = case
    run = jax.jit(lambda *inputs: project_rows(project, inputs))
    whole = [oracle.bits(x) for x in run(*inputs)]
    for order in (np.random.default_rng(1).permutation(M), np.array([200, 3, 70])):
        part = run(*(x[order] for x in inputs))
        for got, want in zip(part, whole, strict=True):
            np.testing.assert_array_equal(oracle.bits(got), want[order])
    wanted = jax.jit(project)(*inputs)
    for got, want in zip(run(*inputs), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.multidevice
def test_each_device_projects_only_its_rows_and_all_hold_the_replicated_bits(case, mesh_of):
    project, inputs, keys, rows = case
    want = jax.jit(lambda inputs, keys, rows: topk_rows(*project_rows(project, inputs), keys, None, rows, k=K))(
        inputs, keys, rows
    )
    for tp, S, merge in ((2, PROJECTION_ROWS, "pmax"), (4, 3, "all_gather")):
        stripes = StripeConfig(rows=S, merge=merge)
        run = jax.jit(
            lambda *args, tp=tp, stripes=stripes: striped_topk_projected(
                project, *args, k=K, mesh=mesh_of(tp), stripes=stripes
            )
        )
        compiled = run.lower(inputs, keys, None, rows).compile()
        for copy in every_copy(compiled(inputs, keys, None, rows), tp):
            np.testing.assert_array_equal(copy, want, err_msg=f"{tp} devices, {S} rows a stripe")
        # Only tiles are projected, as many as hold a device's stripes; a loop over one is no loop.
        text = compiled.as_text()
        own = -(-M // (S * tp)) * S
        tiles = -(-own // PROJECTION_ROWS)
        assert tiles == 1 or f"f32[{tiles},{PROJECTION_ROWS},{RANK}]" in text
        assert f"f32[{PROJECTION_ROWS},{H * D}]" in text
        assert f"f32[{M},{H * D}]" not in text


def test_no_tokens_are_projected_to_no_rows(case):
    project, inputs, *_ = case
    q, gates = jax.eval_shape(lambda *inputs: project_rows(project, inputs), *(x[:0] for x in inputs))
    assert (q.shape, gates.shape) == ((0, H, D), (0, H))
