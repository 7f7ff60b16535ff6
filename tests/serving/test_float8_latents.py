"""Decoders whose latents are cached in float8: the same answers however they are computed, about half of the bytes, and
settings that are refused."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_indexer import KeyFormat
from scripts.lib.rocm_lowering import kernels_in, lower_for_rocm, rocm_mesh
from serving import cli
from serving.config import EngineConfig
from serving.lm import LanguageModel, LmShapes
from serving.load import load_engine
from serving.metrics import Metrics
from serving.models import bind_decoder, cache_formats
from serving.models.decoder import CacheFormats
from serving.protocol import FinishEvent
from serving.runner import cache_pages
from tests.helpers import GOLDENS, relative_error
from tests.serving.harness import CONFIG, Driver, check_chunks
from tests.serving.test_engine_sparse import submit
from tests.serving.test_float8_keys import one_layer
from vitbatch import BucketLadder, CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh
from vitstripe.platform import Platform

FULL = replace(CONFIG, page_size=16, max_seqs=64)
FLOAT8 = replace(FULL, latent_cache="float8")
TOKENS = 61
CHECKPOINTS = {"rotated": one_layer, "not rotated": lambda: Checkpoint(GOLDENS / "glm5_next")}


class Model:
    """A prompt for a checkpoint, and its drivers on two devices."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self._drivers = checkpoint, {}
        self.ids = np.random.default_rng(4).integers(0, 256, TOKENS)

    def driver(self, config: EngineConfig) -> Driver:
        if config not in self._drivers:
            self._drivers[config] = Driver(self.checkpoint, 2, config=config)
        return self._drivers[config]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model(request):
    return Model(CHECKPOINTS[request.param]())


@pytest.mark.parametrize("cuts", [[5, 12, 13], [16, 32]])
def test_chunks_and_decode_passes_give_the_logits_of_one_pass(model, cuts):
    check_chunks(model.driver(FLOAT8), model.ids, cuts, decoded=3)


def test_logits_are_near_those_of_full_latents_and_not_the_same(model):
    ours, full = (d.prefill(d.sequence(model.ids), []) for d in map(model.driver, (FLOAT8, FULL)))
    assert 1e-4 < relative_error(ours, full) < 5e-2


def test_a_token_takes_a_byte_a_latent_number_a_scale_and_its_rotated_columns(model):
    ours, full = (model.driver(config).lm for config in (FLOAT8, FULL))
    layers = [i for i, layer in enumerate(full.abstract_caches()) if "latent" in layer]
    assert layers
    for i in layers:
        caches, others = dict(ours.abstract_caches()[i]), dict(full.abstract_caches()[i])
        rank, width = caches["latent"].shape[-1], others.pop("latent").shape[-1]
        kept = {name: caches.pop(name) for name in [name for name in caches if name.startswith("latent")]}
        assert caches == others, "index keys and open pools stay what they were"
        found = {name: (a.shape[1:], a.dtype) for name, a in kept.items()}
        rotated = {"latent_rotated": ((16, width - rank), jnp.float32)} if width > rank else {}
        assert found == {
            "latent": ((16, rank), jnp.float8_e4m3fn),
            "latent_scales": ((16,), jnp.float32),
            **rotated,
        }
    saved = FULL.page_size * len(layers) * (4 * rank - (rank + 4))
    assert full.bytes_per_page() - ours.bytes_per_page() == saved > 0
    # The same memory holds more pages, so more tokens are admitted.
    config = replace(FULL, cache_tokens=None)
    pages = [cache_pages(config, lm.bytes_per_page(), 200 * full.bytes_per_page()) for lm in (ours, full)]
    assert pages == [int(160 * full.bytes_per_page() / ours.bytes_per_page()), 160]


@pytest.mark.parametrize("name", ["glm_moe_dsa", pytest.param("glm5_next", marks=pytest.mark.slow)])
def test_prompts_answer_as_alone_in_any_chunks_in_company_preempted_and_found_in_the_prefix_cache(name, goldens):
    checkpoint = one_layer() if name == "glm_moe_dsa" else Checkpoint(goldens / name)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 256, length).tolist() for length in (71, 33, 58, 17, 80, 44)]
    answers = []
    for tp, prefill_tokens in ((2, 64), (1, 128)):
        config = EngineConfig(
            tp=tp,
            max_model_len=128,
            page_size=8,
            max_seqs=4,
            prefill_tokens=prefill_tokens,
            cache_tokens=256,
            stripe_rows=8,
            index_keys="float8",
            latent_cache="float8",
        )
        guard, metrics = CompileGuard(), Metrics()
        engine = load_engine(
            checkpoint,
            make_mesh(tp),
            config,
            EncoderConfig(ladder=BucketLadder((64,))),
            model_name=name,
            eos_ids=frozenset(),
            metrics=metrics,
            guard=guard,
        ).engine
        engine.start()
        alone = [submit(engine, f"a{i}", p, 24).result(60)[0] for i, p in enumerate(prompts)]
        assert submit(engine, "again", prompts[-1], 24).result(60)[0] == alone[-1]
        hits = metrics.registry.get_sample_value("vitstripe_prefix_cache_hits_total")
        assert hits == (40 if name == "glm_moe_dsa" else 0), "none where a request has a state"
        results = [future.result(60) for future in [submit(engine, f"b{i}", p, 24) for i, p in enumerate(prompts)]]
        assert [seen for seen, _ in results] == alone
        assert all(isinstance(event, FinishEvent) and event.reason == "length" for _, event in results)
        assert engine._scheduler.preemptions > 0
        assert engine.drain(20.0)
        guard.close()
        assert guard.after_ready == 0
        assert engine._scheduler.pages.used == 0
        answers.append(alone)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")])
def test_the_format_is_the_architectures_own_and_passes_hold_the_kernel(arch, dtype):
    mesh, platform = rocm_mesh(1, arch), Platform("rocm", arch, "")
    config = EngineConfig(max_model_len=96, page_size=16, max_seqs=4, prefill_tokens=64, latent_cache="float8")
    checkpoint = one_layer()
    formats = cache_formats(checkpoint.config, config, platform)
    assert formats == CacheFormats(latents=KeyFormat(dtype))
    binding = bind_decoder(checkpoint, tp=1, dtype=jnp.bfloat16, formats=formats)
    lm = LanguageModel(binding.graphdef, binding.abstract, mesh, config, LmShapes(24), platform=platform)
    programs = {program.name: program for program in lm.programs()}
    for name in ("extend/64/replicated", "decode/4"):
        text = lower_for_rocm(programs[name], mesh)
        assert "sparse_mla" in kernels_in(text), name
        assert ("f8E4M3FNUZ" in text, "f8E4M3FN>" in text) == (arch == "gfx942", arch == "gfx950"), name


def test_a_model_without_latents_and_a_gpu_without_float8_are_refused_by_name():
    config = EngineConfig(latent_cache="float8")
    with pytest.raises(
        ValueError, match=r"latent_cache is 'float8', but model_type 'qwen3_vl' has no latent .*: deepsee"
    ):
        cache_formats({"model_type": "qwen3_vl"}, config, Platform("cpu", "", ""))
    for gpu in (Platform("rocm", "gfx90a", "MI250"), Platform("cuda", "sm80", "A100")):
        with pytest.raises(ValueError, match=f"latent_cache is 'float8', but {gpu.arch} has no float8"):
            cache_formats({"model_type": "glm5_next"}, config, gpu)


def test_a_setting_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="latent_cache is 'fp8'; it must be one of auto, float8"):
        EngineConfig(latent_cache="fp8")
    args = cli.arguments(["--model", "recall", "--latent-cache", "float8"])
    found = cli.engine_config(args, {})
    assert (found.latent_cache, found.index_keys) == ("float8", "auto")
