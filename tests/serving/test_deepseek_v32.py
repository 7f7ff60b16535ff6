"""The DeepSeek-V3.2 decoder against transformers' logits and tokens; test_text_variants.py has YaRN and groups."""

import pytest
from safetensors.numpy import load_file

from serving.models import family_of
from serving.models.decoder import Selection
from serving.models.glm_moe_dsa import GlmMoeDsaConfig
from serving.scheduler import Chunk
from tests.helpers import relative_error
from tests.serving.harness import Driver, checkpoint_at
from vitstripe.checkpoint import Checkpoint, CheckpointError


@pytest.fixture(scope="module")
def golden(goldens):
    return load_file(goldens / "deepseek_v32" / "golden_text.safetensors")


@pytest.fixture(scope="module")
def drivers(goldens):
    made = {}

    def driver(tp: int) -> Driver:
        if tp not in made:
            made[tp] = Driver(checkpoint_at(goldens / "deepseek_v32"), tp)
        return made[tp]

    return driver


@pytest.mark.parity
@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 4, 8))])
def test_logits_and_greedy_tokens_match_transformers(drivers, golden, tp):
    driver = drivers(tp)
    seq = driver.sequence(golden["txt.input_ids"][0])
    logits = driver.prefill(seq, [], Selection(8 if tp > 1 else None))
    assert relative_error(logits, golden["txt.logits"][0]) < 2e-5
    assert driver.greedy(seq, int(logits[-1].argmax()), 12) == golden["txt.greedy12"][0].tolist()


@pytest.mark.parity
def test_any_chunking_gives_the_one_shot_logits(drivers, golden):
    logits = drivers(2).prefill(drivers(2).sequence(golden["txt.input_ids"][0]), [1, 7, 31], Selection(8))
    assert relative_error(logits, golden["txt.logits"][0]) < 2e-5


def test_decoded_tokens_are_those_of_a_prefill(drivers, golden):
    driver, ids = drivers(2), golden["txt.input_ids"][0].tolist()[:36]
    seq = driver.sequence(ids)
    tokens = driver.greedy(seq, int(driver.prefill(seq, [])[-1].argmax()), 12)
    whole = driver.sequence([*ids, *tokens[:-1]], first_page=1)
    [logits] = driver.extend([Chunk(whole, 0, len(whole.tokens))])
    assert logits[-12:].argmax(-1).tolist() == tokens


def test_the_released_spelling_of_its_config_is_read(goldens):
    released = Checkpoint(goldens / "deepseek_v32").config | {
        "rope_parameters": None,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "mlp_layer_types": None,
        "layer_types": None,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 16,
    }
    c = GlmMoeDsaConfig.from_hf(released)
    assert c.sparse_mlp == (False, True)
    assert c.indexer.rope_interleaved is False
    assert c.scale == pytest.approx(144**-0.5 * 1.3688879454**2)
    with pytest.raises(CheckpointError, match="scoring_func"):
        GlmMoeDsaConfig.from_hf(released | {"scoring_func": "softmax"})
    assert family_of(released) is family_of({"model_type": "glm_moe_dsa"})
