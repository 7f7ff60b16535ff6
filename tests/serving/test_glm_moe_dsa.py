"""The GLM-MoE-DSA decoder against transformers' logits, greedy tokens and its own other ways of computing them."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.models.decoder import Selection
from serving.scheduler import Chunk
from tests.helpers import relative_error
from tests.serving.harness import Driver, checkpoint_at
from vitstripe import collectives_in

# transformers builds the two latent norms with eps 1e-6 whatever rms_norm_eps says.
REFERENCE = {"latent_norm_eps": 1e-6}


@pytest.fixture(scope="module")
def golden(goldens):
    return load_file(goldens / "glm_moe_dsa" / "golden_text.safetensors")


@pytest.fixture(scope="module")
def drivers(goldens):
    made = {}

    def driver(tp: int) -> Driver:
        if tp not in made:
            made[tp] = Driver(checkpoint_at(goldens / "glm_moe_dsa", **REFERENCE), tp)
        return made[tp]

    return driver


@pytest.mark.parity
@pytest.mark.parametrize(
    ("tp", "stripes"),
    [
        (2, None),
        (2, 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, None), (4, None), (4, 8), (8, None), (8, 8))),
    ],
)
def test_logits_and_greedy_tokens_match_transformers(drivers, golden, tp, stripes):
    driver, ids = drivers(tp), golden["txt.input_ids"][0]
    seq = driver.sequence(ids)
    logits = driver.prefill(seq, [], Selection(stripes))
    assert relative_error(logits, golden["txt.logits"][0]) < 2e-5
    tokens = driver.greedy(seq, int(logits[-1].argmax()), 12)
    assert tokens == golden["txt.greedy12"][0].tolist()


@pytest.mark.parity
@pytest.mark.parametrize("cuts", [[5, 12, 13], [16, 32], [1, 2, 47]])
def test_any_chunking_gives_the_one_shot_logits(drivers, golden, cuts):
    driver = drivers(2)
    logits = driver.prefill(driver.sequence(golden["txt.input_ids"][0]), cuts, Selection(8))
    assert relative_error(logits, golden["txt.logits"][0]) < 2e-5


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_striped_selections_are_the_bits_of_the_replicated_program(drivers, golden, tp):
    driver, ids = drivers(tp), golden["txt.input_ids"][0]
    ids = np.concatenate([ids, ids[::-1]])[:61]
    driver.prefill(driver.sequence(ids), [])
    replicated = [np.asarray(s) for s in driver.selections]
    assert len(replicated) == 2, "layers 0 and 1 own an indexer, layer 2 shares"
    for merge in ("pmax", "all_gather"):
        driver.prefill(driver.sequence(ids), [], Selection(8, merge))
        for ours, theirs in zip(driver.selections, replicated, strict=True):
            assert (theirs[:61] >= 0).any()
            for shard in ours.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), theirs)


def test_two_requests_in_one_pass_do_not_see_each_other(drivers, golden):
    driver, ids = drivers(2), golden["txt.input_ids"][0]
    other = (ids[::-1][:31] + 3) % 256
    alone = [driver.prefill(driver.sequence(i, first_page=p), []) for p, i in enumerate((ids[:17], other))]
    seqs = [driver.sequence(i, first_page=p) for p, i in enumerate((ids[:17], other))]
    together = driver.extend([Chunk(seqs[1], 0, 31), Chunk(seqs[0], 0, 17)], Selection(8))
    assert relative_error(together[1], alone[0]) < 5e-6
    assert relative_error(together[0], alone[1]) < 5e-6


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("selection", [Selection(None), Selection(8), Selection(8, "all_gather")])
def test_programs_hold_exactly_the_declared_collectives(drivers, tp, selection):
    lm = drivers(tp).lm
    if tp == 1 and selection.stripe_rows:
        return
    for program in (lm.splice(64), lm.extend(64, selection), lm.decode(3)):
        assert collectives_in(program.lower().as_text()) == dict(program.collectives), program.name


@pytest.mark.parametrize("pages", [1, 4])
@pytest.mark.parametrize("stripes", [None, 8])
def test_logits_after_a_cached_prefix_are_those_without_a_cache(drivers, golden, pages, stripes):
    """The latent rows and the index keys of the prefix are another request's."""
    driver, ids = drivers(2), golden["txt.input_ids"][0]
    whole = driver.sequence(ids)
    expected = driver.prefill(whole, [], Selection(stripes))
    seq = driver.after_prefix(whole, driver.sequence(ids, first_page=1), pages)
    [logits] = driver.extend([Chunk(seq, 8 * pages, len(ids))], Selection(stripes))
    assert relative_error(logits, expected[8 * pages :]) < 2e-5
