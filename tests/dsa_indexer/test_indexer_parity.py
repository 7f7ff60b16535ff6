"""Layer 1 of the reference checkpoint: scores, selections and the attention that reads them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open

from dsa_indexer import (
    Indexer,
    IndexerConfig,
    RowBatch,
    sparse_mla,
    store_keys,
    striped_topk_rows,
    to_paged,
    to_ragged,
    topk_paged,
    topk_rows,
)
from dsa_indexer.chunks import map_chunks
from dsa_indexer.scores import ROW_TILE, row_scores
from tests.helpers import det, relative_error
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, CheckpointError, bind, load, raise_problems
from vitstripe.nn import linear, rotate_pairs

pytestmark = pytest.mark.parity

LAYER = "model.layers.1.self_attn."
TOLERANCE = 5e-6
MLA_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


def _bind_indexer(checkpoint: Checkpoint, config: IndexerConfig, layer: int):
    prefix = f"model.layers.{layer}.self_attn.indexer."
    return bind(
        checkpoint,
        lambda: Indexer(config, jnp.float32),
        name="indexer",
        disk_names=lambda path: (prefix + path,),
        owns=lambda tensor: tensor.startswith(prefix),
    )


class Layer:
    """The projections around the indexer, and the indexer itself, from the checkpoint."""

    def __init__(self, folder):
        checkpoint = Checkpoint(folder)
        self.hf, self.config = checkpoint.config, IndexerConfig.from_hf(checkpoint.config)
        binding = _bind_indexer(checkpoint, self.config, 1)
        raise_problems(checkpoint, [binding])
        self.graphdef, self.state = binding.graphdef, load(checkpoint, binding, make_mesh(1))
        self.weights = {
            name.removeprefix(LAYER): jnp.asarray(checkpoint.read(name).astype(np.float32))
            for name in checkpoint.tensors
            if name.startswith(LAYER) and ".indexer." not in name
        }
        self.index, self.attend = jax.jit(self._index), jax.jit(self._attend)

    def project(self, name: str, x: jax.Array) -> jax.Array:
        return linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + MLA_NORM_EPS)
        return x * scale * self.weights[f"{name}.weight"]

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        r = self.config.rope_dim
        inverse = self.config.rope_theta ** -(np.arange(0, r, 2, dtype=np.float32) / r)
        angle = positions.astype(jnp.float32)[:, None] * inverse.astype(np.float32)
        return jnp.cos(angle), jnp.sin(angle)

    def q_lora(self, x: jax.Array) -> jax.Array:
        return self.norm("q_a_layernorm", self.project("q_a_proj", x))

    def _index(self, x: jax.Array, positions: jax.Array):
        """q, gates and keys."""
        cos, sin = self.angles(positions)
        indexer = nnx.merge(self.graphdef, self.state)
        return (*indexer.queries(x, self.q_lora(x), cos, sin), indexer.keys(x, cos, sin))

    def _attend(self, x: jax.Array, positions: jax.Array, slots: jax.Array) -> jax.Array:
        hf, (cos, sin) = self.hf, self.angles(positions)
        heads, nope, rank = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["kv_lora_rank"]
        q = self.project("q_b_proj", self.q_lora(x)).reshape(len(x), heads, -1)
        q_rope = rotate_pairs(q[..., nope:], cos[:, None], sin[:, None])
        up = self.weights["kv_b_proj.weight"].reshape(heads, -1, rank)
        absorbed = jnp.einsum("thn,hnr->thr", q[..., :nope], up[:, :nope])
        compressed = self.project("kv_a_proj_with_mqa", x)
        latent = self.norm("kv_a_layernorm", compressed[:, :rank])
        kv = jnp.concatenate([latent, rotate_pairs(compressed[:, rank:], cos, sin)], -1)
        out = sparse_mla(
            jnp.concatenate([absorbed, q_rope], -1),
            kv,
            slots,
            scale=(nope + self.config.rope_dim) ** -0.5,
            value_dim=rank,
        )
        values = jnp.einsum("thr,hvr->thv", out, up[:, nope:])
        return self.project("o_proj", values.reshape(len(x), -1))


@pytest.fixture(scope="module")
def layer(goldens):
    return Layer(goldens / "glm_moe_dsa")


@pytest.fixture(scope="module")
def golden(goldens):
    with safe_open(goldens / "glm_moe_dsa" / "golden_indexer.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


@pytest.fixture(scope="module")
def meta(goldens):
    return json.loads((goldens / "glm_moe_dsa" / "meta.json").read_text())["indexer"]


def _causal(num_tokens: int) -> RowBatch:
    return RowBatch(jnp.zeros(num_tokens, jnp.int32), jnp.arange(1, num_tokens + 1, dtype=jnp.int32))


@jax.jit
def _scores(q, gates, keys, rows: RowBatch):
    def score(q, gates, ks, lengths):
        return row_scores(q, gates, keys, None, ks, lengths)

    whole_tiles = -(-len(q) // ROW_TILE) * ROW_TILE
    return map_chunks(score, whole_tiles, q, gates, rows.ks, rows.lengths)


jit_topk = jax.jit(topk_rows, static_argnames="k")


def test_queries_keys_and_gates_equal_the_reference(layer, golden, meta):
    x = jnp.asarray(det(meta["s48"]["hidden_shape"], meta["s48"]["hidden_seed"])[0])
    q, gates, keys = layer.index(x, jnp.arange(48))
    assert relative_error(layer.q_lora(x), golden["s48.q_resid"][0]) < TOLERANCE
    # The reference rotates into half order: first all even dimensions of the rotated part, then all odd ones.
    r = layer.config.rope_dim
    order = np.r_[0:r:2, 1:r:2, r : layer.config.head_dim]
    assert relative_error(np.asarray(q)[..., order], golden["s48.index_q"][0]) < TOLERANCE
    assert relative_error(np.asarray(keys)[:, order], golden["s48.index_k"][0]) < TOLERANCE
    assert relative_error(gates * layer.config.head_dim**0.5, golden["s48.index_w"][0]) < TOLERANCE
    assert (q.dtype, gates.dtype, keys.dtype) == (jnp.float32,) * 3


@pytest.mark.parametrize("name", ["s48", "s100", "s12_lt_topk"])
def test_scores_selection_and_attention_equal_the_reference(name, layer, golden, meta):
    x = jnp.asarray(det(meta[name]["hidden_shape"], meta[name]["hidden_seed"])[0])
    num_tokens, k = len(x), layer.config.topk
    q, gates, keys = layer.index(x, jnp.arange(num_tokens))
    rows = _causal(num_tokens)

    want = golden[f"{name}.index_scores"][0]
    visible = np.tril(np.ones((num_tokens, num_tokens), bool))
    np.testing.assert_array_equal(want > -1e38, visible)
    scores = np.where(visible, _scores(q, gates, keys, rows), 0)
    assert relative_error(scores, np.where(visible, want, 0)) < TOLERANCE

    idx = jit_topk(q, gates, keys, None, rows, k=k)
    if f"{name}.topk_sorted" in golden:
        width = golden[f"{name}.topk_sorted"].shape[-1]
        np.testing.assert_array_equal(idx[:, :width], golden[f"{name}.topk_sorted"][0])
        assert (np.asarray(idx)[:, width:] == -1).all()
    assert relative_error(layer.attend(x, jnp.arange(num_tokens), idx), golden[f"{name}.attn_out"][0]) < TOLERANCE


@pytest.mark.multidevice
def test_two_packed_sequences_equal_the_reference_replicated_and_striped(layer, golden, meta, mesh_of):
    lengths, seeds = meta["ragged"]["lengths"], meta["ragged"]["hidden_seeds"]
    hidden = layer.hf["hidden_size"]
    x = jnp.concatenate([jnp.asarray(det((n, hidden), seed)) for n, seed in zip(lengths, seeds, strict=True)])
    positions = jnp.concatenate([jnp.arange(n) for n in lengths])
    q, gates, keys = layer.index(x, positions)
    ks = jnp.asarray(golden["ragged.ks"])
    rows = RowBatch(ks, jnp.asarray(golden["ragged.ke"]) - ks)

    local = jit_topk(q, gates, keys, None, rows, k=layer.config.topk)
    np.testing.assert_array_equal(local, golden["ragged.topk_sorted_local"])
    columns = to_ragged(local, ks)
    np.testing.assert_array_equal(columns, golden["ragged.topk_sorted_global"])
    mesh = mesh_of(2)
    striped = jax.jit(lambda *args: striped_topk_rows(*args, k=layer.config.topk, mesh=mesh))
    everywhere = jax.device_put((q, gates, keys, None, rows), NamedSharding(mesh, PartitionSpec()))
    for shard in striped(*everywhere).addressable_shards:
        np.testing.assert_array_equal(shard.data, local)
    assert relative_error(layer.attend(x, positions, columns), golden["ragged.attn_out"]) < TOLERANCE


def test_decode_from_the_paged_cache_equals_the_reference(layer, golden, meta):
    x = jnp.asarray(det(meta["s100"]["hidden_shape"], meta["s100"]["hidden_seed"])[0])
    q, gates, keys = layer.index(x, jnp.arange(100))
    table = np.array([[6, 2, 4, 0, 7, 1, 3]], np.int32)  # 7 pages of 16
    slots = to_paged(jnp.arange(100, dtype=jnp.int32)[:, None], jnp.zeros(100, jnp.int32), jnp.asarray(table), 16)
    pages = store_keys(jnp.zeros((8, 16, keys.shape[1])), keys, slots[:, 0])
    steps = np.array([15, 16, 40, 99])
    idx = jax.jit(topk_paged, static_argnames="k")(
        q[steps][:, None],
        gates[steps][:, None],
        pages,
        jnp.asarray(np.tile(table, (4, 1))),
        jnp.asarray(steps[:, None] + 1, jnp.int32),
        k=layer.config.topk,
    )
    np.testing.assert_array_equal(idx[:, 0], golden["s100.topk_sorted"][0][steps])


def test_a_layer_that_shares_has_no_weights_and_loading_them_is_an_error(goldens, layer):
    checkpoint = Checkpoint(goldens / "glm_moe_dsa")
    shared = layer.config.layer_types.index("shared")
    with pytest.raises(CheckpointError, match=rf"missing   model.layers.{shared}.self_attn.indexer.wq_b.weight"):
        raise_problems(checkpoint, [_bind_indexer(checkpoint, layer.config, shared)])
    for full in layer.config.full_layers:
        assert not _bind_indexer(checkpoint, layer.config, full).problems


def test_in_bfloat16_the_gates_and_the_key_norm_stay_float32(layer):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Indexer(layer.config, jnp.bfloat16)))
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
        forward, state, abstract(64), abstract(32), abstract(layer.config.rope_dim // 2, jnp.float32)
    )
    assert (q.dtype, gates.dtype, keys.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    assert (q.shape, gates.shape, keys.shape) == ((5, 8, 16), (5, 8), (5, 16))
