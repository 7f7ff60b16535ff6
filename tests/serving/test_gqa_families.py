"""Qwen2.5-VL, GLM-4.1V, GLM-4.6V and GLM-OCR end to end: transformers' logits, greedy tokens and positions."""

import numpy as np
import pytest

from serving.scheduler import Chunk
from tests.helpers import relative_error
from tests.serving.golden_prompt import GoldenPrompt
from vitstripe import collectives_in

FAMILIES = ("qwen2_5_vl", "glm4v", "glm46v", "glm_ocr")
MESHES = [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 4, 8))]


@pytest.fixture(scope="module", params=FAMILIES)
def prompt(request, goldens, mesh_of):
    return GoldenPrompt(goldens / request.param, mesh_of(2))


@pytest.mark.parity
def test_mrope_positions_match_transformers(prompt):
    seq = prompt.sequence(prompt.driver(2))
    np.testing.assert_array_equal(seq.positions, prompt.golden["img.mrope_position_ids"][:, 0])
    assert seq.delta == prompt.golden["img.mrope_delta"][0, 0]


@pytest.mark.parity
@pytest.mark.parametrize("tp", MESHES)
def test_logits_and_greedy_tokens_match_transformers(prompt, tp):
    """Two key heads of four: a mesh of 4 cuts queries and not keys, a mesh of 8 neither."""
    driver = prompt.driver(tp)
    seq = prompt.sequence(driver)
    logits = driver.prefill(seq, [])
    assert relative_error(logits, prompt.golden["img.logits"][0]) < 2e-5
    assert driver.greedy(seq, int(logits[-1].argmax()), 12) == prompt.golden["img.greedy12"][0].tolist()


@pytest.mark.parity
@pytest.mark.parametrize("cuts", [[5], [3, 7, 12, 20]])
def test_a_chunk_edge_may_fall_inside_an_image(prompt, cuts):
    driver = prompt.driver(2)
    logits = driver.prefill(prompt.sequence(driver), cuts)
    assert relative_error(logits, prompt.golden["img.logits"][0]) < 2e-5


def test_decoded_logits_are_those_of_a_prefill(prompt):
    """Teacher-forced: the reference's own answer behind the prompt, at positions moved by the images."""
    driver, seq = prompt.driver(2), prompt.sequence(prompt.driver(2))
    driver.prefill(seq, [])
    answer = prompt.golden["img.greedy12"][0].tolist()
    assert driver.greedy(seq, answer[0], 12) == answer
    longer = prompt.sequence(driver, first_page=1)
    longer.tokens += answer[:-1]
    [logits] = driver.extend([Chunk(longer, 0, len(longer.tokens))])
    assert logits[-len(answer) :].argmax(-1).tolist() == answer


def test_programs_hold_exactly_the_declared_collectives(prompt):
    lm = prompt.driver(2).lm
    for program in (lm.splice(64), lm.extend(64, lm.selections[0]), lm.decode(3)):
        assert collectives_in(program.lower().as_text()) == dict(program.collectives), program.name
