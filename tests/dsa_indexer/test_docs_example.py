"""The example of docs/indexer.md, as it stands there."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import RowBatch
from tests.dsa_indexer import oracle
from tests.helpers import relative_error

EXAMPLE = Path(__file__).parents[2] / "docs" / "indexer.md"


@pytest.mark.multidevice
def test_the_documented_model_attends_to_the_selected_keys_and_nothing_else():
    (code,) = re.findall(r"```python\n(.*?)```", EXAMPLE.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    M, N, H, D, K = 150, 190, 8, 12, names["K"]
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((M, H, D), (N, D), (N, D)))
    index_q, gates, index_k = oracle.exact_inputs(rng, M, N)
    rows = RowBatch(jnp.zeros(M, jnp.int32), jnp.arange(N - M + 1, N + 1, dtype=jnp.int32) - 35)
    assert (np.asarray(rows.lengths) < K).any()

    out = names["model"](*map(jnp.asarray, (q, k, v)), index_q, gates, index_k, rows)

    chosen = oracle.select(oracle.scores_of(index_q, gates, index_k), rows.ks, rows.lengths, K)
    want = np.zeros((M, H, D))
    for m in range(M):
        found = chosen[m][chosen[m] >= 0]
        weights = np.exp(q[m].astype(np.float64) @ k[found].T)
        want[m] = weights / weights.sum(-1, keepdims=True) @ v[found]
    assert relative_error(out, want) < 1e-6
