"""Every language program lowers for ROCm from a CPU, with the declared collectives and nothing a ROCm build lacks."""

import re

import jax.numpy as jnp
import pytest

from serving.config import EngineConfig
from serving.lm import LanguageModel, LmShapes
from serving.models import bind_decoder
from vitstripe import collectives_in
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize(("family", "pool"), [("qwen3_vl", (48, 192)), ("glm_moe_dsa", (0, 0))])
def test_every_program_lowers_for_rocm(goldens, family, pool, tp):
    config = EngineConfig(tp=tp, max_model_len=96, page_size=16, max_seqs=4, prefill_tokens=64)
    binding = bind_decoder(Checkpoint(goldens / family), tp=tp, dtype=jnp.bfloat16)
    lm = LanguageModel(binding.graphdef, binding.abstract, make_mesh(tp), config, LmShapes(24, *pool))
    programs = lm.programs()
    names = [p.name for p in programs]
    assert len(set(names)) == len(names)
    assert ("extend/64/striped" in names) == (family == "glm_moe_dsa" and tp > 1)
    for program in programs:
        lowered = program.fn.trace(*program.args).lower(lowering_platforms=("rocm",))
        text = lowered.as_text()
        assert collectives_in(text) == dict(program.collectives), program.name
        assert f"mhlo.num_partitions = {tp} : i32" in text, program.name
        calls = set(re.findall(r"custom_call @([\w.$]+)", text))
        assert calls <= {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}, program.name
        assert "callback" not in text
