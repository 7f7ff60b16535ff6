"""The kernels that passes hold when they lower for ROCm. That every program lowers: tests/test_rocm_programs.py."""

import jax.numpy as jnp
import pytest

from scripts.lib.rocm_lowering import kernels_in, lower_for_rocm, rocm_mesh
from serving.config import EngineConfig
from serving.lm import LanguageModel, LmShapes
from serving.models import bind_decoder
from tests.serving.harness import checkpoint_at
from vitstripe.platform import Platform

GFX942 = Platform("rocm", "gfx942", "")
# A head dimension that the attention kernels serve, which the small checkpoint has not.
SERVED_HEADS = {"head_dim": 64, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [12, 10, 10]}}


def language_model(folder, tp: int, pool: tuple[int, int], **text) -> LanguageModel:
    """Programs for gfx942 of a checkpoint with some fields of its text_config replaced."""
    config = EngineConfig(tp=tp, max_model_len=96, page_size=16, max_seqs=4, prefill_tokens=64)
    checkpoint = checkpoint_at(folder)
    if text:
        checkpoint = checkpoint_at(folder, text_config=checkpoint.config["text_config"] | text)
    binding = bind_decoder(checkpoint, tp=tp, dtype=jnp.bfloat16)
    shapes = LmShapes(24, *pool)
    return LanguageModel(
        binding.graphdef, binding.abstract, rocm_mesh(tp, GFX942.arch), config, shapes, platform=GFX942
    )


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize(
    ("family", "pool"), [("qwen3_vl", (48, 192)), ("glm_moe_dsa", (0, 0)), ("glm5_next", (48, 64))]
)
def test_programs_have_names_of_their_own_and_stripes_where_there_is_an_indexer_and_a_mesh(goldens, family, pool, tp):
    names = [p.name for p in language_model(goldens / family, tp, pool).programs()]
    assert len(set(names)) == len(names)
    assert ("extend/64/striped" in names) == (family in ("glm_moe_dsa", "glm5_next") and tp > 1)


@pytest.mark.parametrize("tp", [1, 4])
def test_passes_of_a_decoder_with_grouped_queries_hold_its_attention_kernels_and_no_other(goldens, tp):
    lm = language_model(goldens / "qwen3_vl", tp, (48, 192), **SERVED_HEADS)
    kernels = {
        "splice/64": set(),
        "extend/64": {"paged_extend"},
        "score/64": set(),
        "decode/4": {"paged_decode", "paged_combine"},
        "decode/1": {"paged_decode", "paged_combine"},
    }
    programs = {p.name: p for p in lm.programs()}
    assert {name: kernels_in(lower_for_rocm(programs[name], lm.mesh)) for name in kernels} == kernels


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_passes_of_a_decoder_with_hyper_connections_normalise_in_a_kernel(goldens, tp):
    lm = language_model(goldens / "glm5_next", tp, (48, 64))
    programs = {p.name: p for p in lm.programs()}
    for name in (f"extend/64/{'striped' if tp > 1 else 'replicated'}", "decode/4"):
        assert {"sinkhorn", "index_scores", "select_filter"} <= kernels_in(lower_for_rocm(programs[name], lm.mesh)), (
            name
        )
