"""Recall in training: its texts, and that what is trained is what is served."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.lib.miniature.export import write_folder
from scripts.lib.miniature.recall import PRESETS, Recall, make
from scripts.lib.miniature.recall_data import (
    TASKS,
    associations,
    document,
    scored_batch,
    scored_row,
    train_batch,
    train_row,
    writer,
)
from scripts.lib.miniature.recall_model import Form, forward, logits_of
from scripts.lib.miniature.spec import Job
from scripts.lib.miniature.weights import Weights, rounded
from serving.models.decoder import Selection
from serving.tokenizer import Tokenizer
from tests.serving.harness import Driver, checkpoint_at
from vitstripe.checkpoint import Checkpoint

SIZE = 3, 61


@pytest.fixture(scope="module")
def tiny():
    """(miniature, its weights, float32 parameters as a file holds them)."""
    miniature = make("tiny")
    weights = Weights(miniature.parts(jnp.float32))
    return miniature, weights, rounded(weights.initial(3))


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    miniature, weights, params = tiny
    where = tmp_path_factory.mktemp("recall")
    write_folder(where, weights.tensors(params), miniature.files(), "a card")
    return where


@pytest.fixture(scope="module")
def batch():
    drawn = scored_batch("a test", 0, SIZE[0], SIZE[1], SIZE[1], 20, None)
    return {name: jnp.asarray(value) for name, value in vars(drawn).items()}


def loss_and_gradients(tiny, batch, program):
    miniature, weights, params = tiny
    of = jax.jit(jax.value_and_grad(lambda p: miniature.score(weights.modules(p), batch, program).loss))
    return of(params)


def test_a_text_has_the_tokens_that_a_server_would_make_of_it(folder):
    served, w = Tokenizer.from_checkpoint(folder), writer()
    mix = replace(make("tiny").preset.stages[0].mix, repeats=0.0, associations=0.0)
    for seed in range(60):
        row = train_row(random.Random(seed), 200, mix)
        text = w.tokenizer.decode(row.ids, skip_special_tokens=False)
        assert served.encode_prompt(text) == row.ids
    assert [len(served.encode_plain(str(d))) for d in range(10)] == [1] * 10


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_in_the_text_once_and_last(task):
    w = writer()
    for seed in range(20):
        row = scored_row(task, random.Random(seed), 500)
        start = row.answers.index(1)
        answer = w.tokenizer.decode(row.ids[start:-1]).strip()
        before = w.tokenizer.decode(row.ids[:start])
        assert row.ids[-1] == w.end
        assert answer.isdecimal()
        assert before.count(answer) == 1
        assert 400 < len(row.ids) <= 500 or task == "pairs"


@pytest.mark.parametrize(("depth", "end"), [(0.0, "first"), (1.0, "last")])
def test_a_needle_can_be_at_the_very_start_and_the_very_end(depth, end):
    w = writer()
    row = document(random.Random(5), 300, needles=1, questions=1, form=w.forms[2][0], ruler=True, depth=depth)
    lines = w.tokenizer.decode(row.ids).split("\n")[1:-1]
    assert len(lines) > 5
    assert "number of" in (lines[0] if end == "first" else lines[-1])


def test_values_seen_for_the_first_time_are_not_learned():
    w = writer()
    row = document(random.Random(1), 200, needles=3, questions=1, form=w.forms[5][0], digits=5, context_weight=0.5)
    known = [weight for ids, weight in zip(row.ids, row.weights, strict=True) if ids in w.digits]
    assert known == [0.0] * 15 + [max(known), 1.0, 1.0, 1.0, 1.0]
    assert max(known) > 1, "the first digit alone asks which key was meant"


def test_only_associations_told_before_are_learned():
    w = writer()
    for seed in range(20):
        row, seen, line, learned = associations(random.Random(seed), 150), set(), [], 0.0
        for token, weight in zip(row.ids, row.weights, strict=True):
            line.append(token)
            learned += weight
            if token == w.newline:
                assert (learned > 0) == (tuple(line) in seen)
                seen.add(tuple(line))
                line, learned = [], 0.0
        assert max(row.weights) > 1


def test_answers_outweigh_all_else_in_a_text():
    drawn = train_batch(0, 0, 12, 300, 20, replace(make("tiny").preset.stages[0].mix, context_weight=1.0))
    for weights, answers, task in zip(drawn.weights, drawn.answers, drawn.task, strict=True):
        other = weights[answers == 0].sum()
        assert other <= (64.01 if task < 0 else 0.101 * weights[answers > 0].sum())


def test_a_job_draws_one_batch_and_held_out_sets_draw_others():
    miniature = make("tiny")
    job = Job(seed=2, index=7, progress=0.1)
    one, again, other = miniature.draw(job), make("tiny").draw(job), miniature.draw(replace(job, index=8))
    shapes = miniature.shapes(miniature.program(job))
    assert {n: (a.shape, a.dtype) for n, a in one.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    assert all((one[name] == again[name]).all() for name in one)
    assert not (one["ids"] == other["ids"]).all()
    held_out, another = (miniature.draw(Job(seed, 0, 1.0, suite)) for seed, suite in ((2, "64"), (3, "64 random")))
    assert (held_out["ids"] == miniature.draw(Job(9, 0, 1.0, "64"))["ids"]).all(), "the same whatever is trained"
    assert not (held_out["ids"] == another["ids"]).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_program_of_a_preset_has_shapes_and_keys_fewer_than_an_eighth(preset):
    miniature = Recall(preset)
    config, longest = miniature.preset.config, 0
    for stage in miniature.preset.stages:
        for program in stage.programs:
            longest = max(longest, miniature.shapes(program)["answers"].shape[1])
    assert config["index_topk"] * 8 <= longest
    for suite in miniature.suites.values():
        assert all(miniature.shapes(program) for program in suite.programs)


def test_gathered_and_masked_attention_are_one_function(tiny, batch):
    masked, by_mask = loss_and_gradients(tiny, batch, "masked/61/3")
    gathered, by_row = loss_and_gradients(tiny, batch, "gathered/61/3")
    np.testing.assert_allclose(gathered, masked, rtol=1e-5)
    for name, gradient in by_mask.items():
        np.testing.assert_allclose(by_row[name], gradient, atol=2e-5, err_msg=name)


def test_the_divergence_teaches_the_indexers_and_nothing_else(tiny, batch):
    miniature, weights, params = tiny

    def divergence(p):
        return miniature.score(weights.modules(p), batch, "masked/61/3").extra["divergence"]

    for name, gradient in jax.jit(jax.grad(divergence))(params).items():
        assert (np.abs(gradient).max() > 0) == ("indexer" in name), name


def test_the_control_selects_other_keys(tiny, batch):
    miniature, weights, params = tiny
    scores = jax.jit(lambda p: [miniature.score(weights.modules(p), batch, f"{f}/61/3") for f in ("masked", "random")])
    trained, control = scores(params)
    assert not np.isclose(trained.extra["text"], control.extra["text"], rtol=1e-4)
    assert max(trained.extra["held 0"], control.extra["held 0"]) < 1, "either leaves keys out"


@pytest.mark.parametrize(
    ("tp", "selection"),
    [
        (2, Selection(8)),
        pytest.param(1, Selection(None), marks=pytest.mark.slow),
        pytest.param(2, Selection(8, "all_gather"), marks=pytest.mark.slow),
    ],
)
def test_the_trained_forward_has_the_logits_that_are_served(tiny, folder, batch, tp, selection):
    _, weights, params = tiny
    ids = np.asarray(batch["ids"][1, :-1])

    def trained(p, ids):
        decoder = weights.modules(p)["decoder"]
        rows, each = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
        return logits_of(decoder, forward(decoder, ids, rows, each, jax.random.key(0), Form("indexer", True)).hidden)

    wanted = np.asarray(jax.jit(trained)(params, ids[None]))[0]
    driver = Driver(checkpoint_at(folder), tp)
    found = driver.prefill(driver.sequence(ids), [24, 40], selection)
    np.testing.assert_allclose(found, wanted, atol=3e-5 * np.abs(wanted).max())
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


def test_the_folder_holds_what_it_is_said_to_hold(folder):
    full = make("gpu")
    count = Weights(full.parts(jnp.bfloat16)).count
    assert 2 * count < 8e6, "the embedded model stays small"
    assert Checkpoint(folder).config["index_topk"] == 8
    assert {"summary", "data", "input", "limits", "licence"} <= full.card().keys()
