"""Decoders whose index keys are cached in float8: the same selections whichever way they are computed, answers that
lose nothing to neighbours, preemption and the prefix cache, and settings that are refused."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import KeyFormat
from serving import cli
from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from serving.models import cache_formats
from serving.models.decoder import IN_WEIGHTS_DTYPE, CacheFormats, Selection
from serving.protocol import FinishEvent
from tests.helpers import GOLDENS, relative_error
from tests.serving.glm5_next_reference import TINY, write_model
from tests.serving.harness import CONFIG, Driver, check_chunks, checkpoint_at
from tests.serving.test_engine_sparse import submit
from vitbatch import CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh
from vitstripe.platform import Platform

FULL = replace(CONFIG, page_size=16, max_seqs=64)
FLOAT8 = replace(FULL, index_keys="float8")
TOKENS = 61
POOLED = TINY | {
    "num_hidden_layers": 1,
    "layer_types": ["indexed_attention"],
    "indexer_types": ["full"],
    "mlp_layer_types": ["dense"],
}
"""A key for every 8 tokens, of which a row selects 3."""


def one_layer() -> Checkpoint:
    """The first layer of GLM-5's small checkpoint, which selects 16 keys a row; the others count as speculative."""
    return checkpoint_at(GOLDENS / "glm_moe_dsa", num_hidden_layers=1, num_nextn_predict_layers=2)


class Model:
    """Prompts for a checkpoint, and its drivers on two devices."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self._drivers = checkpoint, {}
        self.ids = np.random.default_rng(4).integers(0, checkpoint.config["vocab_size"], TOKENS)

    def driver(self, config: EngineConfig = FLOAT8) -> Driver:
        if config not in self._drivers:
            self._drivers[config] = Driver(self.checkpoint, 2, config=config)
        return self._drivers[config]


@pytest.fixture(scope="module", params=["a key a token", pytest.param("pooled keys", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    if request.param == "a key a token":
        return Model(one_layer())
    return Model(Checkpoint(write_model(tmp_path_factory.mktemp("pooled") / "checkpoint", POOLED)))


def test_striped_selections_are_the_bits_of_the_replicated_ones(model):
    driver = model.driver()
    logits = driver.prefill(driver.sequence(model.ids), [])
    [replicated] = [np.asarray(s) for s in driver.selections]
    assert (replicated[:TOKENS] >= 0).any()
    np.testing.assert_array_equal(driver.prefill(driver.sequence(model.ids), [], Selection(8)), logits)
    for shard in driver.selections[0].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), replicated)


@pytest.mark.parametrize("cuts", [[5, 12, 13], [16, 32]])
def test_chunks_and_decode_passes_give_the_logits_of_one_pass(model, cuts):
    check_chunks(model.driver(), model.ids, cuts, decoded=6)


@pytest.mark.slow
def test_most_rows_select_what_they_select_of_full_keys_and_then_have_their_logits():
    model, found = Model(one_layer()), []
    for config in (FLOAT8, FULL):
        driver = model.driver(config)
        logits = driver.prefill(driver.sequence(model.ids), [])
        found.append((logits, np.asarray(driver.selections[0])[:TOKENS]))
    (ours, rounded), (theirs, full) = found
    same = (rounded == full).all(-1)
    shared = sum(len(np.intersect1d(a[a >= 0], b[b >= 0])) for a, b in zip(rounded, full, strict=True))
    assert 0.7 < same.mean() < 1
    assert shared > 0.97 * (full >= 0).sum()
    assert relative_error(ours[same], theirs[same]) < 1e-6


def test_a_key_takes_a_byte_a_number_and_a_scale(model):
    ours, full = (model.driver(config).lm for config in (FLOAT8, FULL))
    c = ours.decoder.indexer
    slots, caches = FULL.page_size // (c.pool or 1), {name: a for name, a in ours.abstract_caches()[0].items()}
    keys, scales = caches.pop("index"), caches.pop("index_scales")
    assert (keys.shape[1:], keys.dtype) == ((slots, c.head_dim), jnp.float8_e4m3fn)
    assert (scales.shape[1:], scales.dtype) == ((slots,), jnp.float32)
    others = full.abstract_caches()[0]
    del others["index"]
    assert caches == others, "latents and open pools stay what they were"
    assert full.bytes_per_page() - ours.bytes_per_page() == slots * (4 * c.head_dim - (c.head_dim + 4))


def load(folder: Path, config: EngineConfig):
    guard, metrics = CompileGuard(), Metrics()
    checkpoint = one_layer() if folder.name == "glm_moe_dsa" else Checkpoint(folder)
    engine = load_engine(
        checkpoint,
        make_mesh(config.tp),
        config,
        EncoderConfig(),
        model_name=folder.name,
        eos_ids=frozenset(),
        metrics=metrics,
        guard=guard,
    ).engine
    return engine, metrics, guard


def test_long_prompts_answer_as_alone_striped_preempted_and_found_in_the_prefix_cache(goldens):
    config = EngineConfig(
        tp=2,
        max_model_len=128,
        page_size=8,
        max_seqs=4,
        prefill_tokens=64,
        cache_tokens=256,
        stripe_rows=8,
        index_keys="float8",
    )
    engine, metrics, guard = load(goldens / "glm_moe_dsa", config)
    engine.start()
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 256, length).tolist() for length in (71, 33, 58, 17, 80, 44)]
    alone = [submit(engine, f"a{i}", p, 24).result(60)[0] for i, p in enumerate(prompts)]
    assert engine._scheduler.preemptions == 0
    assert submit(engine, "again", prompts[-1], 24).result(60)[0] == alone[-1]
    assert metrics.registry.get_sample_value("vitstripe_prefix_cache_hits_total") == 40
    results = [future.result(60) for future in [submit(engine, f"b{i}", p, 24) for i, p in enumerate(prompts)]]
    assert [seen for seen, _ in results] == alone
    assert all(isinstance(event, FinishEvent) and event.reason == "length" for _, event in results)
    assert engine._scheduler.preemptions > 0
    striped = metrics.registry.get_sample_value("vitstripe_indexer_rows_total", {"path": "striped"})
    assert striped > sum(map(len, prompts)), "most prefill rows go the striped way"
    assert engine.drain(20.0)
    guard.close()
    assert guard.after_ready == 0
    assert engine._scheduler.pages.used == 0


@pytest.mark.parametrize(
    ("platform", "dtype"),
    [
        (Platform("cpu", "", ""), "float8_e4m3fn"),
        (Platform("cuda", "sm90", ""), "float8_e4m3fn"),
        (Platform("rocm", "gfx950", ""), "float8_e4m3fn"),
        (Platform("rocm", "gfx942", ""), "float8_e4m3fnuz"),
    ],
)
def test_the_format_is_the_platforms_own(platform, dtype):
    config = {"model_type": "glm_moe_dsa"}
    assert cache_formats(config, EngineConfig(index_keys="float8"), platform) == CacheFormats(KeyFormat(dtype))
    assert cache_formats(config, EngineConfig(), platform) == IN_WEIGHTS_DTYPE


def test_a_model_without_an_indexer_and_a_gpu_without_float8_are_refused_by_name(goldens):
    with pytest.raises(ValueError, match=r"'qwen3_vl' has no indexer .*: deepseek_v32, glm5_next, glm_moe_dsa"):
        load(goldens / "qwen3_vl", EngineConfig(index_keys="float8"))
    for gpu in (Platform("rocm", "gfx90a", "MI250"), Platform("cuda", "sm80", "A100")):
        with pytest.raises(ValueError, match=f"index_keys is 'float8', but {gpu.arch} has no float8"):
            cache_formats({"model_type": "glm_moe_dsa"}, EngineConfig(index_keys="float8"), gpu)


def test_a_setting_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="index_keys is 'int8'; it must be one of auto, float8"):
        EngineConfig(index_keys="int8")
    args = cli.arguments(["--model", "recall", "--index-keys", "float8"])
    assert cli.engine_config(args, {}).index_keys == "float8"
