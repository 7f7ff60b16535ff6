"""Names that a trace shows for the parts of a program."""

import jax
import jax.numpy as jnp
import numpy as np

from dsa_indexer import RowBatch, StripeConfig, striped_topk_rows
from serving.models.paged_attention import paged_attention
from serving.protocol import SamplingParams
from serving.sampling import SampleArgs, Seats, sample


def names_in(function, *arguments) -> str:
    """The lowered program with its source names."""
    return jax.jit(function).lower(*arguments).as_text(debug_info=True)


def test_selection_is_named_by_score_select_and_merge(mesh_of):
    rows = RowBatch(ks=jnp.zeros(12, jnp.int32), lengths=jnp.arange(20, 32, dtype=jnp.int32))

    def select(q, gates, keys):
        return striped_topk_rows(q, gates, keys, None, rows, k=5, mesh=mesh_of(2), stripes=StripeConfig(rows=4))

    text = names_in(select, jnp.ones((12, 3, 8)), jnp.ones((12, 3)), jnp.ones((33, 8)))
    for name in ("score/", "select/", "merge/"):
        assert name in text


def test_sampling_and_attention_have_their_names():
    of_reals, ints = SampleArgs.rows(SamplingParams(max_tokens=1), seed=5)
    arguments = SampleArgs.stack([(of_reals, ints)], [0], [0], 1)
    seats = Seats(np.zeros((1, 11), np.int32), np.zeros((1, 11), np.float32))
    assert "sample/" in names_in(sample, jnp.ones((1, 11)), arguments, seats)
    assert paged_attention.__name__ == "paged_attention", "a named scope must not hide the function"
