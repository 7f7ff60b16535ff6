"""The GLM-5-Next decoder: transformers' logits on its checkpoint, and a plain float64 reference on models that show
what that checkpoint cannot."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.config import EngineConfig
from serving.models.decoder import Selection
from tests.helpers import relative_error
from tests.serving.glm5_next_reference import TINY, Reference, write_model
from tests.serving.golden_prompt import GoldenPrompt
from tests.serving.harness import Driver
from vitstripe import collectives_in
from vitstripe.checkpoint import Checkpoint

# -- transformers' checkpoint: two layers, two images in 32 tokens


@pytest.fixture(scope="module")
def prompt(goldens, mesh_of):
    return GoldenPrompt(goldens / "glm5_next", mesh_of(2), mrope=False)


MESHES = [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 4, 8))]


@pytest.mark.parity
@pytest.mark.parametrize("tp", MESHES)
def test_logits_and_greedy_tokens_match_transformers(prompt, tp):
    driver = prompt.driver(tp)
    seq = prompt.sequence(driver)
    logits = driver.prefill(seq, [], Selection(8 if tp > 1 else None))
    assert relative_error(logits, prompt.golden["img.logits"][0]) < 2e-5
    assert driver.greedy(seq, int(logits[-1].argmax()), 12) == prompt.golden["img.greedy12"][0].tolist()


@pytest.mark.parity
@pytest.mark.parametrize("cuts", [[1, 2, 30], [5, 12, 13], [16, 21]])
def test_any_chunking_gives_the_one_shot_logits(prompt, cuts):
    """Edges inside a pool and inside an image, chunks shorter than the convolution."""
    driver = prompt.driver(2)
    logits = driver.prefill(prompt.sequence(driver), cuts, Selection(8))
    assert relative_error(logits, prompt.golden["img.logits"][0]) < 2e-5


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("selection", [Selection(None), Selection(8), Selection(8, "all_gather")])
def test_programs_hold_exactly_the_declared_collectives(prompt, tp, selection):
    lm = prompt.driver(tp).lm
    if tp == 1 and selection.stripe_rows:
        return
    for program in (lm.splice(64), lm.extend(64, selection), lm.decode(3)):
        assert collectives_in(program.lower().as_text()) == dict(program.collectives), program.name


def test_pool_numbers_go_over_the_mesh_and_the_tokens_of_pools_do_not(prompt):
    """16 tokens of 4 a pool: 4 numbers a row are merged, 19 columns are what a row attends to."""
    gathered = Selection(8, "all_gather")
    for selection, merge, expected in (Selection(8), "all_reduce", "64x4xi32"), (gathered, "all_gather", "2x32x4xi32"):
        text = prompt.driver(2).lm.extend(64, selection).lower().as_text()
        # The result's type stands behind the operation, after the body of a reduction.
        found = re.findall(rf'"stablehlo.{merge}".*?-> tensor<([^>]+)>', text, re.DOTALL)
        assert [shape for shape in found if shape.endswith("xi32")] == [expected]


# -- what two layers with published epsilons do not show

TOKENS = 150
SIZES = EngineConfig(max_model_len=208, page_size=16, max_seqs=TOKENS, prefill_tokens=192)
MODELS = {
    "pools of 8": TINY,
    "pools of 16, two streams, free decay": {
        **TINY,
        "index_kpool": 16,
        "index_topk": 32,
        "hc_mult": 2,
        "linear_lower_bound": None,
        "linear_conv_kernel_dim": 3,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "swiglu_limit": 1.0,
    },
}


class Model:
    """One of MODELS with random weights: the reference's logits and selections of a prompt, and drivers."""

    def __init__(self, folder, config):
        self.folder = write_model(folder, config)
        self.ids = np.random.default_rng(8).integers(0, config["vocab_size"], TOKENS)
        reference = Reference(config, load_file(folder / "model.safetensors"))
        self.logits = reference.logits(self.ids)
        self.selections = reference.selections
        self._drivers = {}

    def driver(self, tp: int) -> Driver:
        if tp not in self._drivers:
            self._drivers[tp] = Driver(Checkpoint(self.folder), tp, config=SIZES)
        return self._drivers[tp]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(name: str) -> Model:
        if name not in made:
            made[name] = Model(tmp_path_factory.mktemp("model") / "checkpoint", MODELS[name])
        return made[name]

    return model


def lists(selection, count=TOKENS):
    """The tokens each of the first rows attends to."""
    return [row[row >= 0].tolist() for row in np.asarray(selection)[:count]]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_selections_are_those_of_the_formulas(models, name):
    """Large epsilons, groups of experts, a clamp that bites, three chunks, a selection shared across another layer."""
    model = models(name)
    driver = model.driver(1)
    logits = driver.prefill(driver.sequence(model.ids), [])
    assert relative_error(logits, model.logits) < 2e-5
    [ours], [theirs] = driver.selections, model.selections
    assert lists(ours) == theirs


@pytest.mark.parametrize("name", ["pools of 8", pytest.param(list(MODELS)[1], marks=pytest.mark.slow)])
def test_decode_steps_close_pools_and_give_the_logits_of_prefill(models, name):
    model = models(name)
    driver, prompt = model.driver(1), 61
    seq = driver.sequence(model.ids[:prompt])
    driver.prefill(seq, [1, 3])
    decoded = []
    for token in model.ids[prompt:]:
        seq.tokens.append(int(token))
        decoded.append(driver.decode([seq])[0])
    assert relative_error(np.array(decoded), model.logits[prompt:]) < 2e-5


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cuts", [[], [2, 3, 71, 72, 137]], ids=["one shot", "chunks"])
def test_a_mesh_in_any_chunks_gives_the_logits_of_one_device(models, tp, cuts):
    model = models("pools of 8")
    driver = model.driver(tp)
    logits = driver.prefill(driver.sequence(model.ids), cuts, Selection(8))
    assert relative_error(logits, model.logits) < 2e-5


@pytest.mark.parametrize("merge", ["pmax", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_striped_selections_are_the_bits_of_the_replicated_program(models, merge):
    model = models("pools of 8")
    driver = model.driver(2)
    driver.prefill(driver.sequence(model.ids), [])
    replicated = [np.asarray(s) for s in driver.selections]
    driver.prefill(driver.sequence(model.ids), [], Selection(8, merge))
    for ours, theirs in zip(driver.selections, replicated, strict=True):
        assert lists(theirs)[-1]
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), theirs)


def test_requests_in_one_pass_do_not_see_each_other_and_leave_nothing_in_their_seats(models):
    """Two requests in turns on seats that held NaN, then on each other's seats."""
    model = models("pools of 8")
    driver = model.driver(2)
    prompts = model.ids[:78], (model.ids[::-1][:51] + 3) % 96
    alone = [driver.prefill(driver.sequence(ids), [])[-2:] for ids in prompts]

    def ruin(array, cache):
        return jnp.full_like(array, jnp.nan) if cache.per_request else array

    caches = zip(driver.caches, driver.lm.decoder.caches(), strict=True)
    driver.caches = [{n: ruin(a, kinds[n]) for n, a in layer.items()} for layer, kinds in caches]
    driver.caches = jax.device_put(driver.caches, jax.tree.map(lambda a: a.sharding, driver.lm.abstract_caches()))
    for seats in ((0, 1), (1, 0)):
        a, b = (driver.sequence(ids[:-1], first_page=seat) for ids, seat in zip(prompts, seats, strict=True))
        driver.extend([driver.chunk(a, 0, 63), driver.chunk(b, 0, 2)], Selection(8))
        parts = driver.extend([driver.chunk(a, 63, 77), driver.chunk(b, 2, 50)], Selection(8))
        for seq, ids in zip((a, b), prompts, strict=True):
            seq.tokens.append(int(ids[-1]))
        for part, decoded, expected in zip(parts, driver.decode([a, b]), alone, strict=True):
            assert relative_error(part[-1], expected[0]) < 5e-6
            assert relative_error(decoded, expected[1]) < 5e-6


def test_a_page_that_is_no_whole_number_of_pools_is_refused(models):
    model = models("pools of 16, two streams, free decay")
    with pytest.raises(ValueError, match=r"page_size is 24.*every 16 tokens"):
        Driver(Checkpoint(model.folder), 1, config=EngineConfig(max_model_len=208, page_size=24))
