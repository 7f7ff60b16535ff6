"""On an AMD GPU: the reference's numbers, and every device of a mesh with the same bits. `-m rocm`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dsa_indexer import RowBatch, StripeConfig, sparse_mla, striped_topk_rows, topk_rows
from serving.models.decoder import Selection
from tests.helpers import det, relative_error
from tests.serving.harness import Driver, checkpoint_at
from vitbatch import BucketLadder, EncoderConfig, VisionEncoder
from vitbatch.encoder import Frame
from vitstripe import make_mesh
from vitstripe.platform import default_platform

pytestmark = pytest.mark.rocm

needs_two = pytest.mark.skipif("len(jax.devices()) < 2", reason="NOT MEASURED: needs 2 devices")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "glm4v", "glm_ocr"])
def test_a_tower_gives_the_reference_s_rows_in_float32(goldens, family):
    name = "b_1x6x10"
    golden = load_file(goldens / family / "golden_vision.safetensors")
    given = json.loads((goldens / family / "meta.json").read_text())["vision"][name]
    config = EncoderConfig(ladder=BucketLadder((256,)), dtype=jnp.float32)
    encoder = VisionEncoder.from_checkpoint(goldens / family, mesh=make_mesh(1), config=config)
    (rows,) = encoder.encode_frames([Frame(det(tuple(given["input_shape"]), given["input_seed"]), (6, 10))])
    wanted = [golden[f"{name}.pooler_output"], *(golden[f"{name}.deepstack{k}"] for k in range(encoder.num_deepstack))]
    assert relative_error(rows, np.concatenate(wanted, -1)) < 2e-5


def test_a_sparse_decoder_gives_the_reference_s_logits_in_float32(goldens):
    golden = load_file(goldens / "glm_moe_dsa" / "golden_text.safetensors")
    driver = Driver(checkpoint_at(goldens / "glm_moe_dsa", latent_norm_eps=1e-6), 1)
    logits = driver.prefill(driver.sequence(golden["txt.input_ids"][0]), [13], Selection(None))
    assert relative_error(logits, golden["txt.logits"][0]) < 2e-5


def problem(rows, keys, heads=8, dim=64):
    draw = np.random.default_rng(3)
    dtype = default_platform().default_dtype
    q, k = (jnp.asarray(draw.normal(size=shape), dtype) for shape in ((rows, heads, dim), (keys, dim)))
    gates = jnp.asarray(draw.normal(size=(rows, heads)), jnp.float32)
    lengths = jnp.asarray(draw.integers(0, keys + 1, rows), jnp.int32)
    return q, gates, k, None, RowBatch(jnp.zeros_like(lengths), lengths)


@needs_two
@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_striped_rows_select_the_bits_of_replicated_ones_on_every_device(merge):
    count = len(jax.devices())
    arguments = problem(64 * count + 37, 1000)
    expected = np.asarray(jax.jit(lambda *a: topk_rows(*a, k=96))(*arguments))
    stripes, mesh = StripeConfig(rows=16, merge=merge), make_mesh(count)
    merged = jax.jit(lambda *a: striped_topk_rows(*a, k=96, mesh=mesh, stripes=stripes))(*arguments)
    assert len(merged.addressable_shards) == count
    for shard in merged.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected)


def test_the_key_at_the_start_of_a_long_context_is_found_by_the_last_row():
    q, gates, keys, scales, _ = problem(16, 70001)
    keys = keys.at[0].set(50 * jnp.einsum("mh,mhd->md", jnp.abs(gates), q)[-1].astype(keys.dtype))
    gates = jnp.abs(gates)
    lengths = jnp.full(16, 70001, jnp.int32)
    chosen = np.asarray(jax.jit(lambda *a: topk_rows(*a, k=64))(q, gates, keys, scales, RowBatch(0 * lengths, lengths)))
    assert chosen[-1, 0] == 0
    assert (np.diff(chosen, axis=-1) > 0).all()


def test_sparse_attention_is_the_softmax_over_what_was_selected():
    draw, dtype = np.random.default_rng(5), default_platform().default_dtype
    q, kv = (jnp.asarray(draw.normal(size=shape), dtype) for shape in ((19, 16, 96), (300, 96)))
    chosen = np.sort(np.stack([draw.permutation(300)[:40] for _ in range(19)])).astype(np.int32)
    chosen[2, 11:] = -1
    out = jax.jit(lambda *a: sparse_mla(*a, scale=0.1, value_dim=64))(q, kv, jnp.asarray(chosen))
    q64, kv64 = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    for row, own in enumerate(chosen):
        own = own[own >= 0]
        weights = np.exp(0.1 * q64[row] @ kv64[own].T)
        wanted = weights / weights.sum(-1, keepdims=True) @ kv64[own, :64]
        assert relative_error(np.asarray(out[row], np.float32), wanted) < 0.02
