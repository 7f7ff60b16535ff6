"""scripts/train_miniature: trains an embedded model from nothing and writes its folder."""

import argparse
import datetime
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scripts.lib.miniature.card import write_card
from scripts.lib.miniature.export import write_folder
from scripts.lib.miniature.feed import Feed
from scripts.lib.miniature.journal import Journal, plot
from scripts.lib.miniature.loop import Clock, evaluate, passed, train
from scripts.lib.miniature.optimizer import Optimizer
from scripts.lib.miniature.programs import Programs
from scripts.lib.miniature.saves import Saves
from scripts.lib.miniature.spec import Miniature, Recipe
from scripts.lib.miniature.tally import as_text
from scripts.lib.miniature.weights import Weights

# Each module has `make(preset) -> Miniature` and `RECIPES`, a Recipe for each preset.
MINIATURES = {"sight": "scripts.lib.miniature.sight.miniature", "recall": "scripts.lib.miniature.recall"}
PRESETS = ("gpu", "cpu", "tiny")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/train_miniature",
        description="Trains an embedded model from a fixed random state and writes a Hugging Face folder with its "
        "card, a log of JSON lines and a plot of loss and accuracy. On one data-centre GPU it takes the minutes "
        "that it is given; on a CPU it trains a smaller model that shows the way and is not good.",
        epilog="example: scripts/train_miniature sight --out sight --minutes 8.5",
    )
    parser.add_argument("miniature", choices=MINIATURES)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the model's folder goes")
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto", help="cpu also means its preset")
    parser.add_argument("--preset", choices=PRESETS, help="size of model and batches, instead of the device's")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="wall clock, start to end, evaluation included")
    length.add_argument("--steps", type=int, help="instead of minutes; such a run can be repeated exactly")
    parser.add_argument("--seed", type=int, help="of weights and data")
    parser.add_argument("--workers", type=int, help="processes that draw batches; 0 draws in this one")
    parser.add_argument("--reuse", type=int, help="how often a drawn batch is used")
    parser.add_argument("--peak", type=float, help="highest learning rate")
    parser.add_argument("--optimizer", choices=("muon", "adamw"))
    parser.add_argument("--log-steps", type=int, help="steps between lines of log")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="where Orbax checkpoints go; none otherwise")
    parser.add_argument("--save-steps", type=int, help="steps between checkpoints; one is always made at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--log", type=Path, metavar="FILE", help="JSON lines; FOLDER/training.jsonl unless given")
    parser.add_argument("--no-eval", action="store_true", help="write the folder without measuring")
    options = parser.parse_args(arguments)
    if options.resume and not options.checkpoints:
        parser.error("--resume needs --checkpoints, the folder to resume from")
    return options


def settings(options: argparse.Namespace, recipe: Recipe) -> Recipe:
    """The preset's recipe with what the command line replaces."""
    given = {
        name: value
        for name in ("seed", "workers", "reuse", "peak", "optimizer", "log_steps", "save_steps")
        if (value := getattr(options, name)) is not None
    }
    if options.minutes is not None or options.steps is not None:
        given |= {"minutes": options.minutes, "steps": options.steps}
    recipe = replace(recipe, **given)
    # A drawn stretch of batches must not be cut in two by a checkpoint.
    stretch = 8 * recipe.reuse if recipe.reuse > 1 else 1
    return replace(recipe, save_steps=-(-recipe.save_steps // stretch) * stretch)


def module_of(name: str) -> tuple[Callable[[str], Miniature], dict[str, Recipe]]:
    module: Any = importlib.import_module(MINIATURES[name])
    return module.make, module.RECIPES


def main(arguments: list[str] | None = None) -> int:
    # What was imported before this counts too; it was computing, mostly.
    began = time.monotonic() - time.process_time()
    options = parse(arguments)
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    make, recipes = module_of(options.miniature)
    # The processes are started before this one touches the device.
    preset = options.preset or ("cpu" if options.device == "cpu" else "gpu")
    recipe = settings(options, recipes[preset])
    feed = Feed(make, preset, recipe.workers)
    on_gpu = jax.devices()[0].platform == "gpu"
    if options.device == "gpu" and not on_gpu:
        raise SystemExit("error: --device gpu, but jax sees no GPU here; install the cuda or rocm extra")
    if options.device == "auto" and not options.preset and not on_gpu:
        raise SystemExit("error: jax sees no GPU; ask for the small preset with --device cpu")

    miniature = make(preset)
    weights, optimizer = Weights(miniature.parts(jnp.bfloat16 if on_gpu else jnp.float32)), Optimizer(recipe)
    journal = Journal(options.log or options.out / "training.jsonl", began)
    programs = Programs(miniature, weights, optimizer, journal.say)
    reserve = 0.0 if options.no_eval else recipe.eval_seconds
    clock = Clock(recipe, began, reserve)
    saves = Saves(options.checkpoints) if options.checkpoints else None
    journal.say(f"{miniature.name}: {weights.count} parameters on {jax.devices()[0].device_kind}, {recipe}")
    try:
        trained = train(miniature, weights, recipe, clock, feed, journal, programs, optimizer, saves, options.resume)

        def time_left() -> float:
            return float("inf") if recipe.minutes is None else 60 * recipe.minutes - 4 - journal.seconds()

        tallies = {} if options.no_eval else evaluate(miniature, trained.params, recipe, feed, programs, time_left)
        for name, tally in tallies.items():
            journal.say(f"{name}: {as_text(tally.accuracy())}")
            journal.write("suite", name=name, counts=tally.counts())
        misses = [name for name, good in passed(miniature, tallies).items() if not good]
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        card = write_card(miniature, recipe, trained, tallies, weights.count, date)
        size = write_folder(options.out, weights.tensors(trained.params), miniature.files(), card)
        plotted = plot(journal.entries, options.out / "training.png")
        journal.say(f"{options.out}: {size / 1e6:.2f} MB" + ("" if plotted else "; no plot without matplotlib"))
        if tallies:
            journal.say("gates missed: " + ", ".join(misses) if misses else "every gate reached")
    finally:
        journal.close()
        programs.close()
        feed.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
