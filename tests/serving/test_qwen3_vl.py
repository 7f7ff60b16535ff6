"""Qwen3-VL end to end, photographs' rows and text: transformers' logits, greedy tokens and M-RoPE positions."""

import numpy as np
import pytest

from serving.scheduler import Chunk
from tests.helpers import relative_error
from tests.serving.golden_prompt import GoldenPrompt
from vitstripe import collectives_in


@pytest.fixture(scope="module")
def prompt(goldens, mesh_of):
    return GoldenPrompt(goldens / "qwen3_vl", mesh_of(2))


@pytest.fixture(scope="module")
def golden(prompt):
    return prompt.golden


@pytest.fixture(scope="module")
def case(prompt):
    """driver(tp) and sequence(driver): the golden prompt with its images' rows scattered over the row pool."""
    return prompt.driver, prompt.sequence


@pytest.mark.parity
def test_mrope_positions_match_transformers(golden, case):
    driver, sequence = case
    seq = sequence(driver(1))
    np.testing.assert_array_equal(seq.positions, golden["img.mrope_position_ids"][:, 0])
    assert seq.delta == golden["img.mrope_delta"][0, 0]
    after = seq.positions_of(30, 35)
    np.testing.assert_array_equal(after[:, :2], golden["img.mrope_position_ids"][:, 0, 30:])
    np.testing.assert_array_equal(after[:, 2:], np.broadcast_to(np.arange(32, 35) + seq.delta, (3, 3)))


@pytest.mark.parity
@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_logits_and_greedy_tokens_match_transformers(golden, case, tp):
    driver, sequence = case
    seq = sequence(driver(tp))
    logits = driver(tp).prefill(seq, [])
    assert relative_error(logits, golden["img.logits"][0]) < 2e-5
    assert driver(tp).greedy(seq, int(logits[-1].argmax()), 12) == golden["img.greedy12"][0].tolist()


@pytest.mark.parity
@pytest.mark.parametrize("cuts", [[5], [3, 7, 12, 20], list(range(1, 32))])
def test_a_chunk_edge_may_fall_inside_an_image(golden, case, cuts):
    driver, sequence = case
    logits = driver(2).prefill(sequence(driver(2)), cuts)
    assert relative_error(logits, golden["img.logits"][0]) < 2e-5


def test_deepstack_rows_change_the_logits(golden, case):
    driver, sequence = case
    whole, pool = driver(2), driver(2).pool
    without = pool.copy()
    without[:, whole.lm.decoder.hidden_size :] = 0
    try:
        whole.pool = without
        logits = whole.prefill(sequence(whole), [])
    finally:
        whole.pool = pool
    assert relative_error(logits, golden["img.logits"][0]) > 1e-3


def test_programs_hold_exactly_the_declared_collectives(case):
    driver, _ = case
    for tp in (1, 2, 4, 8):
        lm = driver(tp).lm
        for program in (lm.splice(64), lm.extend(64, lm.selections[0]), lm.decode(3)):
            assert collectives_in(program.lower().as_text()) == dict(program.collectives), (tp, program.name)


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_logits_after_a_cached_prefix_are_those_without_a_cache(golden, case, pages):
    """Page edges at 8, 16 and 24 of 32 tokens: inside an image, between the two and after them."""
    driver, sequence = case
    whole = sequence(driver(2))
    expected = driver(2).prefill(whole, [])
    seq = driver(2).after_prefix(whole, sequence(driver(2), first_page=1), pages)
    [logits] = driver(2).extend([Chunk(seq, 8 * pages, 32)])
    assert relative_error(logits, expected[8 * pages :]) < 2e-5
    assert relative_error(logits, golden["img.logits"][0][8 * pages :]) < 2e-5
