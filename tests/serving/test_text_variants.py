"""YaRN, groups of experts, partial rotation, and the two mixtures beside a vision tower: transformers' logits."""

import json

import numpy as np
import pytest

from serving.models.decoder import Selection
from tests.helpers import relative_error
from tests.serving.text_variants import FOLDER, Variant, weights_of

DEEPSEEK = ("deepseek_v32_yarn", "deepseek_v32_mscale")
BESIDE_A_TOWER = ("glm4v_partial", "glm4v_moe", "qwen3_vl_moe")


@pytest.mark.parity
@pytest.mark.parametrize("tp", [1, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (2, 4, 8))])
@pytest.mark.parametrize("name", [*DEEPSEEK, *BESIDE_A_TOWER])
def test_logits_match_transformers(tmp_path, name, tp):
    """deepseek: 72 tokens of which each attends to 16; the others with an image's positions in the middle."""
    variant = Variant(name, tmp_path)
    stripes = Selection(8 if tp > 1 and name in DEEPSEEK else None)
    logits = variant.logits(variant.driver(tp), [31, 64] if name in DEEPSEEK else [13], stripes)
    assert relative_error(logits, variant.golden["logits"]) < 2e-5


@pytest.mark.parity
@pytest.mark.parametrize("field", ["factor", "mscale", "mscale_all_dim"])
def test_every_number_of_yarn_changes_the_logits(tmp_path, field):
    config = json.loads((FOLDER / "deepseek_v32_mscale" / "config.json").read_text())
    variant = Variant("deepseek_v32_mscale", tmp_path, rope_parameters=config["rope_parameters"] | {field: 1.25})
    logits = variant.logits(variant.driver(1), [31, 64], Selection(None))
    assert relative_error(logits, variant.golden["logits"]) > 1e-3


@pytest.mark.parity
def test_experts_may_be_written_transposed(tmp_path):
    """Released Qwen3-VL mixtures hold [E, in, out]."""
    tensors = weights_of("qwen3_vl_moe")
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    variant = Variant("qwen3_vl_moe", tmp_path, tensors)
    logits = variant.logits(variant.driver(2), [], Selection(None))
    assert relative_error(logits, variant.golden["logits"]) < 2e-5
