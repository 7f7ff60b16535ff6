"""Qwen3.5 against transformers: an image prompt of the dense model, and a long text of a mixture of experts."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.config import EngineConfig
from serving.models import bind_decoder
from serving.models.qwen3_5 import FULL, LINEAR, Qwen35Config
from tests.helpers import GOLDENS, relative_error
from tests.serving.golden_prompt import GoldenPrompt
from tests.serving.harness import Driver, checkpoint_at
from vitstripe import collectives_in
from vitstripe.checkpoint import Checkpoint, CheckpointError

TEXT = GOLDENS / "qwen3_5_moe_text"
LONG = EngineConfig(max_model_len=176, page_size=8, max_seqs=150, prefill_tokens=192)
MESHES = [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 4, 8))]


@pytest.fixture(scope="module")
def prompt(goldens, mesh_of):
    return GoldenPrompt(goldens / "qwen3_5", mesh_of(2))


@pytest.fixture(scope="module")
def mixture():
    """driver(tp) of the text model: four layers, three value heads a key head, keys of 8, values of 12 channels, half
    of an attention head rotated."""
    made = {}

    def driver(tp: int) -> Driver:
        if tp not in made:
            made[tp] = Driver(checkpoint_at(TEXT), tp, None, LONG)
        return made[tp]

    return driver


@pytest.fixture(scope="module")
def long_text():
    return load_file(TEXT / "golden_text.safetensors")


@pytest.mark.parity
@pytest.mark.parametrize("tp", MESHES)
def test_logits_and_greedy_tokens_match_transformers(prompt, tp):
    """Two key heads of four: a mesh of 4 cuts value heads and not key heads, a mesh of 8 neither."""
    driver = prompt.driver(tp)
    seq = prompt.sequence(driver)
    logits = driver.prefill(seq, [])
    assert relative_error(logits, prompt.golden["img.logits"][0]) < 2e-5
    assert driver.greedy(seq, int(logits[-1].argmax()), 12) == prompt.golden["img.greedy12"][0].tolist()


@pytest.mark.parity
def test_mrope_positions_match_transformers(prompt):
    seq = prompt.sequence(prompt.driver(2))
    np.testing.assert_array_equal(seq.positions, prompt.golden["img.mrope_position_ids"][:, 0])
    assert seq.delta == prompt.golden["img.mrope_delta"][0, 0]


@pytest.mark.parity
@pytest.mark.parametrize("cuts", [[5], [3, 7, 12, 20], [1, 2, 3, 4]])
def test_a_chunk_edge_may_fall_inside_an_image(prompt, cuts):
    driver = prompt.driver(2)
    logits = driver.prefill(prompt.sequence(driver), cuts)
    assert relative_error(logits, prompt.golden["img.logits"][0]) < 2e-5


@pytest.mark.parity
@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 3))])
def test_long_text_of_a_mixture_matches_transformers(mixture, long_text, tp):
    """150 tokens, thirty of them the same. A mesh of 3 cuts value heads and not key heads."""
    driver = mixture(tp)
    seq = driver.sequence(long_text["input_ids"][0])
    logits = driver.prefill(seq, [])
    assert relative_error(logits, long_text["logits"][0]) < 2e-5
    assert driver.greedy(seq, int(logits[-1].argmax()), 8) == long_text["greedy8"][0].tolist()


@pytest.mark.parity
@pytest.mark.parametrize("cuts", [[64, 128], [7, 71, 72, 140]])
def test_any_chunking_gives_the_one_shot_logits(mixture, long_text, cuts):
    driver = mixture(2)
    logits = driver.prefill(driver.sequence(long_text["input_ids"][0]), cuts)
    assert relative_error(logits, long_text["logits"][0]) < 2e-5


@pytest.mark.parity
def test_decoded_logits_are_those_of_a_prefill(mixture, long_text):
    driver, ids = mixture(2), long_text["input_ids"][0]
    seq = driver.sequence(ids[:143])
    driver.prefill(seq, [])
    decoded = []
    for token in ids[143:].tolist():
        seq.tokens.append(token)
        decoded.append(driver.decode([seq])[0])
    assert relative_error(np.stack(decoded), long_text["logits"][0][143:]) < 2e-5


def test_two_requests_in_one_pass_do_not_see_each_other(mixture, long_text):
    driver, ids = mixture(2), long_text["input_ids"][0]
    prompts = (ids[:61], ids[::-1][:66])
    alone = [driver.prefill(driver.sequence(p, first_page=i), []) for i, p in enumerate(prompts)]
    seqs = [driver.sequence(p, first_page=i) for i, p in enumerate(prompts)]
    together = driver.extend([driver.chunk(seqs[1], 0, 66), driver.chunk(seqs[0], 0, 61)])
    assert relative_error(together[1], alone[0]) < 1e-5
    assert relative_error(together[0], alone[1]) < 1e-5
    # And one token of each, side by side, from the states that the pass left.
    tokens = [int(part[-1].argmax()) for part in (together[1], together[0])]
    for seq, token in zip(seqs, tokens, strict=True):
        seq.tokens.append(token)
    side_by_side = driver.decode(seqs)
    for seq, p, token, logits in zip(range(2), prompts, tokens, side_by_side, strict=True):
        again = driver.sequence(np.append(p, token), first_page=seq)
        assert relative_error(logits, driver.prefill(again, [])[-1]) < 1e-5


def test_programs_hold_exactly_the_declared_collectives(prompt, mixture):
    for driver in (prompt.driver(1), prompt.driver(2), mixture(2), mixture(3)):
        lm = driver.lm
        for program in (lm.splice(192), lm.extend(192, lm.selections[0]), lm.decode(3)):
            assert collectives_in(program.lower().as_text()) == dict(program.collectives), program.name


def test_a_seat_holds_what_its_bytes_say(mixture):
    """A delta net keeps 3 rows of 2 * 16 + 72 channels and six matrices [8, 12] of float32, of each request."""
    lm = mixture(1).lm
    assert lm.keeps_state
    assert lm.bytes_per_seat() == 3 * 4 * (3 * (2 * 16 + 72) + 6 * 8 * 12)
    assert lm.bytes_per_page() == 4 * 2 * 8 * 3 * 16, "one layer has keys and values of a page"
    # A mesh of 3 keeps all key heads' channels on every device.
    assert mixture(3).lm.bytes_per_seat() == 3 * 4 * (3 * (2 * 16 + 24) + 2 * 8 * 12)
    state = mixture(2).lm.abstract_caches()[0]["state"]
    assert (state.shape, state.dtype) == ((150, 6, 8, 12), np.float32)


# -- the checkpoint


@pytest.mark.parametrize("fused", ["in_proj_qkvz", "in_proj_ba"])
def test_projections_as_qwen3_next_fuses_them_are_refused_in_one_line(fused):
    checkpoint = checkpoint_at(TEXT)
    checkpoint.tensors[f"model.layers.1.linear_attn.{fused}.weight"] = TEXT / "model.safetensors"
    with pytest.raises(CheckpointError, match=rf"layers\.1\.linear_attn\.{fused}.* interleaved by key head") as caught:
        bind_decoder(checkpoint, tp=1, dtype="float32")
    assert "use a checkpoint with in_proj_qkv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_qwen3_next_itself_is_refused_by_its_model_type():
    with pytest.raises(CheckpointError, match=r"model_type 'qwen3_next' is not supported; known: .*qwen3_5,"):
        bind_decoder(checkpoint_at(TEXT, model_type="qwen3_next"), tp=1, dtype="float32")


def test_without_layer_types_every_fourth_layer_is_full_attention():
    config = {k: v for k, v in Checkpoint(TEXT).config.items() if k != "layer_types"}
    assert Qwen35Config.from_hf(config | {"num_hidden_layers": 5}).layer_types == (LINEAR, LINEAR, LINEAR, FULL, LINEAR)
    assert Qwen35Config.from_hf(config | {"full_attention_interval": 2}).layer_types == (LINEAR, FULL) * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types must name .* for 4 layers"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types must name"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is no multiple of linear_num_key_heads 2"),
        ({"rope_parameters": {"mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5}}, r"\[2, 2, 2\] must be three"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_by_name(fields, message):
    with pytest.raises(CheckpointError, match=message):
        Qwen35Config.from_hf(Checkpoint(TEXT).config | fields)
