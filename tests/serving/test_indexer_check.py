"""The indexer's check at the server's start: kernels against plain XLA, stripes against one device."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from dsa_indexer import IndexerConfig, KeyFormat, StripeConfig, check_kernels, scores, striped_topk_rows
from serving import indexer_check
from serving.config import CACHE_DTYPES
from serving.indexer_check import check_indexer, check_passes
from serving.lm import LanguageModel, LmShapes
from serving.models import bind_decoder, cache_formats
from tests.serving.harness import CONFIG
from vitstripe.checkpoint import Checkpoint
from vitstripe.platform import Platform, platform_of

CPU, CUDA = Platform("cpu", "", ""), Platform("cuda", "", "made-up GPU")


def indexer(num_heads: int = 8, head_dim: int = 16, topk: int = 20) -> IndexerConfig:
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "topk": topk, "q_lora_rank": 8, "hidden_size": 8}
    return IndexerConfig(**sizes, rope_dim=0, rope_theta=1e4, layer_types=("full",))


def model(folder: Path, mesh, platform: Platform = CPU, index_keys: str = "auto") -> LanguageModel:
    """The language model of a checkpoint, without its weights."""
    checkpoint, dtype = Checkpoint(folder), jnp.float32 if platform is CPU else jnp.bfloat16
    config = replace(CONFIG, tp=mesh.size, index_keys=index_keys)
    formats = cache_formats(checkpoint.config, config, platform)
    binding = bind_decoder(checkpoint, tp=mesh.size, dtype=dtype, formats=formats)
    return LanguageModel(binding.graphdef, binding.abstract, mesh, config, LmShapes(16), platform=platform)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run as plain JAX operations, so that what a GPU would run can be run here."""
    compiled = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **options: compiled(*args, **options | {"interpret": True}))


def spoil(monkeypatch, name: str, wrong) -> None:
    """Has the score kernel of that name multiply with wrong(gates)."""
    right = getattr(scores, name)
    monkeypatch.setattr(scores, name, lambda q, gates, *args, **options: right(q, wrong(gates), *args, **options))


@pytest.mark.parametrize(("name", "index_keys"), [("glm_moe_dsa", "auto"), ("glm5_next", "float8")])
def test_right_kernels_pass(interpreted, goldens, mesh_of, name, index_keys):
    check_indexer(model(goldens / name, mesh_of(1), CUDA, index_keys), StripeConfig())


@pytest.mark.slow
def test_a_kernel_that_leaves_out_the_scales_of_float8_keys_is_told(interpreted, monkeypatch, goldens, mesh_of):
    right = scores.row_scores_triton

    def wrong(q, gates, keys, key_scales, *args, **options):
        return right(q, gates, keys, jnp.ones_like(key_scales), *args, **options)

    monkeypatch.setattr(scores, "row_scores_triton", wrong)
    with pytest.raises(RuntimeError, match="other contiguous keys than plain XLA"):
        check_indexer(model(goldens / "glm_moe_dsa", mesh_of(1), CUDA, "float8"), StripeConfig())


def test_a_kernel_that_gives_heads_the_gates_of_others_is_told(interpreted, monkeypatch, mesh_of):
    spoil(monkeypatch, "row_scores_triton", lambda gates: gates[:, jnp.array([1, 0, 2, 3, 4, 5, 6, 7])])
    with pytest.raises(RuntimeError, match=r"other contiguous keys than plain XLA in \d+ of 37 rows on .*made-up GPU"):
        check_kernels(indexer(), mesh_of(1), dtype=jnp.bfloat16, page_size=8, platform=CUDA)


def test_a_wrong_kernel_for_pages_alone_is_told(interpreted, monkeypatch, mesh_of):
    spoil(monkeypatch, "paged_scores_triton", lambda gates: -gates)
    with pytest.raises(RuntimeError, match="other paged keys than plain XLA"):
        check_kernels(indexer(), mesh_of(1), dtype=jnp.bfloat16, page_size=8, platform=CUDA)


@pytest.mark.multidevice
def test_the_device_whose_kernel_is_wrong_is_named(interpreted, monkeypatch, mesh_of):
    spoil(monkeypatch, "row_scores_triton", lambda gates: jnp.where(lax.axis_index("tp") == 1, -gates, gates))
    with pytest.raises(RuntimeError, match=r"rows on (\S*1)\b.*JAX_PLATFORMS=cpu"):
        check_kernels(indexer(), mesh_of(2), dtype=jnp.bfloat16, page_size=8, platform=CUDA)


def test_one_cpu_and_a_model_without_an_indexer_need_no_check(goldens, mesh_of, compile_counter):
    models = [model(goldens / "glm_moe_dsa", mesh_of(1)), model(goldens / "qwen3_vl", mesh_of(1), CUDA)]
    with compile_counter() as compiles:
        for lm in models:
            check_indexer(lm, StripeConfig())
    assert compiles.count == 0


@pytest.mark.multidevice
@pytest.mark.parametrize("index_keys", ["auto", pytest.param("float8", marks=pytest.mark.slow)])
def test_wrong_stripes_are_told_and_right_ones_pass(monkeypatch, goldens, mesh_of, index_keys):
    lm, stripes = model(goldens / "glm_moe_dsa", mesh_of(2), CPU, index_keys), StripeConfig(rows=8)
    check_indexer(lm, stripes)

    def wrong(*args, **options):
        return striped_topk_rows(*args, **options).at[3].set(-1)

    monkeypatch.setattr(indexer_check, "striped_topk_rows", wrong)
    with pytest.raises(RuntimeError, match=r"in 1 of 21 rows on .*--no-indexer-stripes"):
        check_indexer(lm, stripes)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("keys", CACHE_DTYPES)
def test_on_a_gpu_its_own_kernels_pass(mesh_of, heads, keys):
    device = platform_of(jax.devices()[0])
    dtype = KeyFormat.fp8(device.arch).jax_dtype if keys == "float8" else jnp.bfloat16
    check_kernels(indexer(heads, 128, 2048), mesh_of(1), dtype=dtype, page_size=64, platform=device)


def logits_apart(share: float) -> list:
    """Two rows of logits that lie `share` of their norm apart."""
    draw = np.random.default_rng(0)
    first, noise = draw.normal(size=1001).astype(np.float32), draw.normal(size=1001).astype(np.float32)
    return [first, first + share * noise * np.linalg.norm(first) / np.linalg.norm(noise)]


def test_passes_compiled_each_for_itself_may_round_otherwise_in_16_bits():
    check_passes(logits_apart(0.1), 128, jnp.bfloat16)
    check_passes(logits_apart(1e-4), 128, jnp.float32)
    with pytest.raises(RuntimeError, match="at 128 rows"):
        check_passes(logits_apart(0.1), 128, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_passes_that_have_nothing_in_common_are_told(dtype):
    with pytest.raises(RuntimeError, match="--no-indexer-stripes"):
        check_passes(logits_apart(1.4), 128, dtype)
    first, other = logits_apart(0.0)
    other[7] = np.nan
    with pytest.raises(RuntimeError, match="--no-indexer-stripes"):
        check_passes([first, other], 128, dtype)
    with pytest.raises(RuntimeError, match="not finite"):
        check_passes([other], 128, dtype)
