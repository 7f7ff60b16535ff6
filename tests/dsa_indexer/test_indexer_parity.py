"""Layer 1 of the reference checkpoints with a key a token: scores, selections and the attention that reads them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsa_indexer import (
    Indexer,
    RowBatch,
    store_keys,
    striped_topk_rows,
    to_paged,
    to_ragged,
    topk_paged,
    topk_rows,
)
from dsa_indexer.scores import row_scores
from tests.dsa_indexer.layer import TOLERANCE, Layer, bind_indexer
from tests.helpers import relative_error
from vitstripe.checkpoint import Checkpoint, CheckpointError, raise_problems

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def layer(request):
    return Layer(request.param)


@pytest.fixture(scope="module")
def glm_layer():
    return Layer("glm_moe_dsa")


ROWS = 104  # every prompt is padded to as many rows and keys, so that all share their programs


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, ROWS - len(x))] + [(0, 0)] * (x.ndim - 1))


def _causal(num_tokens: int) -> RowBatch:
    return RowBatch(jnp.zeros(ROWS, jnp.int32), _padded(jnp.arange(1, num_tokens + 1, dtype=jnp.int32)))


@jax.jit
def _scores(q, gates, keys, rows: RowBatch):
    return row_scores(q, gates, keys, None, rows.ks, rows.lengths)


jit_topk = jax.jit(topk_rows, static_argnames="k")
jit_paged = jax.jit(topk_paged, static_argnames="k")
EVERY = jnp.arange(ROWS)


def test_queries_keys_and_gates_equal_the_reference(layer):
    golden, x = layer.golden, _padded(layer.hidden("s48"))
    q, gates, keys = (a[:48] for a in layer.index(x, EVERY))
    assert relative_error(layer.q_lora(x)[:48], golden["s48.q_resid"][0]) < TOLERANCE
    order = np.arange(layer.config.head_dim)
    if layer.config.rope_interleaved:
        # The reference rotates into half order: first all even dimensions of the rotated part, then all odd ones.
        r = layer.config.rope_dim
        order = np.r_[0:r:2, 1:r:2, r : layer.config.head_dim]
    assert relative_error(np.asarray(q)[..., order], golden["s48.index_q"][0]) < TOLERANCE
    assert relative_error(np.asarray(keys)[:, order], golden["s48.index_k"][0]) < TOLERANCE
    assert relative_error(gates * layer.config.head_dim**0.5, golden["s48.index_w"][0]) < TOLERANCE
    assert (q.dtype, gates.dtype, keys.dtype) == (jnp.float32,) * 3


@pytest.mark.parametrize("name", ["s48", "s100", "s12_lt_topk"])
def test_scores_selection_and_attention_equal_the_reference(name, layer):
    golden, x = layer.golden, _padded(layer.hidden(name))
    num_tokens = golden[f"{name}.index_scores"].shape[1]
    q, gates, keys = layer.index(x, EVERY)
    rows = _causal(num_tokens)

    want = golden[f"{name}.index_scores"][0]
    visible = np.tril(np.ones((num_tokens, num_tokens), bool))
    np.testing.assert_array_equal(want > -1e38, visible)
    scores = np.where(visible, _scores(q, gates, keys, rows)[:num_tokens, :num_tokens], 0)
    assert relative_error(scores, np.where(visible, want, 0)) < TOLERANCE

    idx = jit_topk(q, gates, keys, None, rows, k=layer.config.topk)
    width = golden[f"{name}.topk_sorted"].shape[-1]
    np.testing.assert_array_equal(idx[:num_tokens, :width], golden[f"{name}.topk_sorted"][0])
    assert (np.asarray(idx)[:, width:] == -1).all()
    attended = layer.attend(x, EVERY, idx)[:num_tokens]
    assert relative_error(attended, golden[f"{name}.attn_out"][0]) < TOLERANCE


@pytest.mark.multidevice
def test_two_packed_sequences_equal_the_reference_replicated_and_striped(layer, mesh_of):
    golden, lengths = layer.golden, layer.meta["ragged"]["lengths"]
    x, count = _padded(layer.packed("ragged")), sum(lengths)
    positions = _padded(jnp.concatenate([jnp.arange(n) for n in lengths]))
    q, gates, keys = layer.index(x, positions)
    ks = jnp.asarray(golden["ragged.ks"])
    rows = RowBatch(_padded(ks), _padded(jnp.asarray(golden["ragged.ke"]) - ks))

    local = jit_topk(q, gates, keys, None, rows, k=layer.config.topk)
    np.testing.assert_array_equal(local[:count], golden["ragged.topk_sorted_local"])
    columns = to_ragged(local, rows.ks)
    np.testing.assert_array_equal(columns[:count], golden["ragged.topk_sorted_global"])
    everywhere = jax.device_put((q, gates, keys, None, rows), NamedSharding(mesh_of(2), PartitionSpec()))
    for shard in _striped(mesh_of(2), layer.config.topk)(*everywhere).addressable_shards:
        np.testing.assert_array_equal(shard.data, local)
    assert relative_error(layer.attend(x, positions, columns)[:count], golden["ragged.attn_out"]) < TOLERANCE


@cache
def _striped(mesh, k: int):
    return jax.jit(lambda *args: striped_topk_rows(*args, k=k, mesh=mesh))


def test_decode_from_the_paged_cache_equals_the_reference(layer):
    x = _padded(layer.hidden("s100"))
    q, gates, keys = (a[:100] for a in layer.index(x, EVERY))
    table = np.array([[6, 2, 4, 0, 7, 1, 3]], np.int32)  # 7 pages of 16
    slots = to_paged(jnp.arange(100, dtype=jnp.int32)[:, None], jnp.zeros(100, jnp.int32), jnp.asarray(table), 16)
    pages = store_keys(jnp.zeros((8, 16, keys.shape[1])), keys, slots[:, 0])
    steps = np.array([15, 16, 40, 99])
    idx = jit_paged(
        q[steps][:, None],
        gates[steps][:, None],
        pages,
        page_table=jnp.asarray(np.tile(table, (4, 1))),
        lengths=jnp.asarray(steps[:, None] + 1, jnp.int32),
        k=layer.config.topk,
    )
    np.testing.assert_array_equal(idx[:, 0], layer.golden["s100.topk_sorted"][0][steps])


def test_the_other_rotary_layout_selects_other_keys_but_only_past_k_tokens(layer):
    """The mistake that short prompts do not show."""
    x, k = _padded(layer.hidden("s100")), layer.config.topk
    other = Layer(layer.folder.name, rope_interleaved=not layer.config.rope_interleaved)
    idx = np.asarray(jit_topk(*other.index(x, EVERY), None, _causal(100), k=k))[:100]
    want = layer.golden["s100.topk_sorted"][0]
    np.testing.assert_array_equal(idx[:k], want[:k])
    assert (idx[k:] != want[k:]).any(1).mean() > 0.5


def test_a_layer_that_shares_has_no_weights_and_loading_them_is_an_error(glm_layer):
    checkpoint, config = Checkpoint(glm_layer.folder), glm_layer.config
    shared = config.layer_types.index("shared")
    with pytest.raises(CheckpointError, match=rf"missing   model.layers.{shared}.self_attn.indexer.wq_b.weight"):
        raise_problems(checkpoint, [bind_indexer(checkpoint, config, shared, "model.")])
    for full in config.full_layers:
        assert not bind_indexer(checkpoint, config, full, "model.").problems


def test_in_bfloat16_the_gates_and_the_key_norm_stay_float32(glm_layer):
    config = glm_layer.config
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Indexer(config, jnp.bfloat16)))
    dtypes = {".".join(map(str, path)): leaf.get_value().dtype for path, leaf in nnx.to_flat_state(state)}
    assert dtypes == {
        "wq_b.weight": jnp.bfloat16,
        "wk.weight": jnp.bfloat16,
        "k_norm.weight": jnp.float32,
        "k_norm.bias": jnp.float32,
        "weights_proj.weight": jnp.float32,
    }

    def forward(state, x, q_lora, angle):
        indexer = nnx.merge(graphdef, state)
        return indexer.queries(x, q_lora, angle, angle), indexer.keys(x, angle, angle)

    def abstract(width, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((5, width), dtype)

    (q, gates), keys = jax.eval_shape(
        forward, state, abstract(64), abstract(32), abstract(config.rope_dim // 2, jnp.float32)
    )
    assert (q.dtype, gates.dtype, keys.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    assert (q.shape, gates.shape, keys.shape) == ((5, 8, 16), (5, 8), (5, 16))
