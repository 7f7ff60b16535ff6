"""The training loop, tried on a miniature of one layer: it learns, repeats itself, resumes, and writes what it made."""

import json
import time
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.lib.miniature.card import interval, write_card
from scripts.lib.miniature.export import write_folder
from scripts.lib.miniature.feed import Feed
from scripts.lib.miniature.journal import Journal
from scripts.lib.miniature.loop import Clock, evaluate, passed, train
from scripts.lib.miniature.optimizer import Optimizer, rate_at
from scripts.lib.miniature.programs import Programs
from scripts.lib.miniature.saves import Saves
from scripts.lib.miniature.spec import Job, Recipe
from scripts.lib.miniature.weights import Weights
from tests.miniature.toy import make

RECIPE = Recipe(steps=96, peak=0.03, warmup_steps=8, workers=0, log_steps=8, optimizer="muon")


def run(recipe: Recipe, folder=None, *, resume=False, until=None):
    """Trains the toy; (what came of it, losses by step, programs, weights). until: stops there as if killed."""
    toy = make("tiny")
    weights, optimizer = Weights(toy.parts(jnp.float32)), Optimizer(recipe)
    programs, feed = Programs(toy, weights, optimizer), Feed(make, "tiny", recipe.workers)
    journal = Journal(None, time.monotonic())
    clock = Clock(recipe, time.monotonic(), 0.0)
    if until is not None:
        clock.over = lambda step: step >= until
    saves = None if folder is None else Saves(folder)
    try:
        trained = train(toy, weights, recipe, clock, feed, journal, programs, optimizer, saves, resume)
        tallies = evaluate(toy, trained.params, recipe, feed, programs)
    finally:
        feed.close()
        programs.close()
    losses = {entry["step"]: entry["loss"] for entry in journal.entries if entry["kind"] == "steps"}
    return toy, weights, trained, losses, tallies


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_loss_falls_and_the_task_is_learnt(optimizer):
    toy, _, trained, losses, tallies = run(replace(RECIPE, optimizer=optimizer))
    assert trained.steps == 96
    assert losses[96] < 0.4 * losses[8], losses
    assert tallies["held-out"].counts()["direction"][1] == 96, "two batches of 48"
    assert passed(toy, tallies) == {"held-out/direction": True}, tallies["held-out"].accuracy()


def test_a_resumed_run_has_the_losses_and_the_weights_of_one_that_was_not_stopped(tmp_path):
    whole = run(RECIPE)
    run(replace(RECIPE, save_steps=16), tmp_path, until=40)
    again = run(RECIPE, tmp_path, resume=True)
    assert again[3] == {step: loss for step, loss in whole[3].items() if step > 40}
    for path, value in whole[2].params.items():
        np.testing.assert_array_equal(value, again[2].params[path], err_msg=path)


def test_a_batch_may_be_used_several_times_and_then_training_sees_fewer(tmp_path):
    drawn = Feed(make, "tiny", 0).batches((Job(0, i, 0.0) for i in range(100)), reuse=3)
    indices = [next(drawn)[0].index for _ in range(30)]
    assert indices == [*range(8)] * 3 + [*range(8, 14)]


def test_worker_processes_draw_the_batches_that_this_process_would():
    jobs = [Job(7, i, 0.0) for i in range(5)]
    feed = Feed(make, "tiny", 1)
    try:
        drawn = list(feed.batches(iter(jobs)))
    finally:
        feed.close()
    assert [job for job, _ in drawn] == jobs
    for job, batch in drawn:
        for name, array in make("tiny").draw(job).items():
            np.testing.assert_array_equal(batch[name], array)


def test_held_out_batches_are_other_ones_than_those_of_training():
    draw = make("tiny").draw
    trained, held_out = draw(Job(0, 0, 0.0)), draw(Job(0, 0, 0.0, "held-out"))
    assert not np.any(trained["x"] == held_out["x"])


def test_the_rate_warms_up_by_steps_and_falls_to_the_floor_by_progress():
    rate = rate_at(replace(RECIPE, floor=0.1))
    assert rate(0, 0.0) == pytest.approx(0.03 / 8)
    assert rate(20, 0.0) == pytest.approx(0.03)
    assert rate(50, 0.5) == pytest.approx(0.03 * 0.55)
    assert rate(95, 1.0) == pytest.approx(0.003)


def test_the_rate_may_stay_at_its_peak_and_then_fall_in_a_straight_line():
    rate = rate_at(replace(RECIPE, floor=0.1, decay_from=0.6))
    assert rate(20, 0.6) == pytest.approx(0.03)
    assert rate(50, 0.8) == pytest.approx(0.03 * 0.55)
    assert rate(95, 1.0) == pytest.approx(0.003)


def test_with_minutes_training_ends_so_that_the_evaluation_fits():
    clock = Clock(Recipe(minutes=2.0), began=time.monotonic() - 100.0, reserve=15.0)
    clock.start()
    assert not clock.over(10**6)
    clock.began -= 5.1
    assert clock.over(0)


def test_the_folder_holds_bfloat16_tensors_and_a_card_with_the_counts(tmp_path):
    toy, weights, trained, _, tallies = run(replace(RECIPE, steps=16))
    card = write_card(toy, RECIPE, trained, tallies, weights.count, "2026-11-29")
    write_folder(tmp_path, weights.tensors(trained.params), toy.files(), card)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in saved.items()} == {
        "model.norm.weight": ((6,), ml_dtypes.bfloat16),
        "model.up_proj.weight": ((16, 6), ml_dtypes.bfloat16),
        "model.down_proj.weight": ((4, 16), ml_dtypes.bfloat16),
        "model.down_proj.bias": ((4,), ml_dtypes.bfloat16),
    }
    np.testing.assert_array_equal(
        saved["model.up_proj.weight"].astype(np.float32),
        np.asarray(trained.params["layer:up_proj.weight"].astype(jnp.bfloat16), np.float32),
    )
    right, asked = tallies["held-out"].counts()["direction"]
    assert f"| direction | {right} | {asked} |" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "config.json").read_text()) == {}


def test_wilsons_interval_is_that_of_the_textbook():
    low, high = interval(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)  # R. G. Newcombe, Statistics in Medicine 17, 1998


def test_a_recipe_takes_minutes_or_steps_and_not_both():
    with pytest.raises(ValueError, match="exactly one"):
        Recipe(minutes=3, steps=5)
