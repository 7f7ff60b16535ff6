"""The training loop: batches in, gradients, update, a line of log now and then."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from scripts.lib.miniature.feed import Feed
from scripts.lib.miniature.journal import Journal
from scripts.lib.miniature.optimizer import Optimizer, rate_at
from scripts.lib.miniature.programs import Programs
from scripts.lib.miniature.saves import Saves
from scripts.lib.miniature.spec import Batch, Job, Miniature, Recipe, Scores
from scripts.lib.miniature.tally import Tally
from scripts.lib.miniature.weights import Params, Weights, rounded

# Steps that are under way on the device before the host looks at a result: it stays busy while the host reads.
_IN_FLIGHT = 3
# From here on, what the evaluation runs is compiled beside the training.
_PREPARE_SCORES = 0.5
# Jobs looked at, at each tenth of the training, to learn which programs it runs.
_SAMPLED_JOBS = 64


@dataclass
class Clock:
    """How far a run is. began: of the process. With minutes, training ends `reserve` seconds before they are over, and
    what comes before the first step (compiling, mostly) is no part of its progress."""

    recipe: Recipe
    began: float
    reserve: float
    first_step: float | None = None

    def start(self) -> None:
        self.first_step = time.monotonic()

    def progress(self, step: int) -> float:
        """0 at the first step, 1 when training must end."""
        if self.recipe.steps is not None:
            return min(1.0, step / self.recipe.steps)
        assert self.recipe.minutes is not None
        end = self.began + 60 * self.recipe.minutes - self.reserve
        now = time.monotonic()
        if self.first_step is None or now >= end:
            return float(now >= end)
        return (now - self.first_step) / (end - self.first_step)

    def over(self, step: int) -> bool:
        return self.progress(step) >= 1.0


@dataclass
class Trained:
    """params: float32 masters. steps, seconds: made and taken, this run's seconds alone. waited: of those, for data."""

    params: Params
    steps: int
    seconds: float
    waited: float
    questions: int


def train(
    miniature: Miniature,
    weights: Weights,
    recipe: Recipe,
    clock: Clock,
    feed: Feed,
    journal: Journal,
    programs: Programs,
    optimizer: Optimizer,
    saves: Saves | None,
    resume: bool,
) -> Trained:
    """Trains until the recipe's steps or minutes are over."""
    params, step = weights.initial(recipe.seed), 0
    state = jax.jit(optimizer.init)(params)
    if resume and saves is not None and (newest := saves.newest()) is not None:
        params, state = saves.restore(newest, weights.shapes(), jax.eval_shape(lambda: state))
        step = newest
        journal.say(f"resumed at step {step}")
    if not recipe.staged:
        _prepare(miniature, recipe, programs)
    rate, window, done = rate_at(recipe), Tally(miniature.tasks), 0
    under_way: deque[tuple[int, float, Scores]] = deque()
    # Its compilation is no part of the first stage of a curriculum.
    programs.prepare("gradients", miniature.program(Job(recipe.seed, step // recipe.reuse, 0.0))).result()
    if recipe.staged:
        _prepare(miniature, recipe, programs)
    began = logged = time.monotonic()
    jobs = _jobs(recipe, clock, step)

    for _job, program, batch in _batches(miniature, feed, jobs, recipe, programs):
        if clock.first_step is None:
            programs.wait(program)
            clock.start()
            began = logged = time.monotonic()
        if clock.over(step):
            break
        progress = clock.progress(step)
        if progress > _PREPARE_SCORES:
            for suite in miniature.suites.values():
                for name in suite.programs:
                    programs.prepare("scores", name)
        gradients, scores = programs.gradients(params, batch, program)
        params, state = programs.update(params, state, gradients, rate(step, progress))
        under_way.append((step, progress, scores))
        step += 1
        if len(under_way) > _IN_FLIGHT:
            at, where, scores = under_way.popleft()
            window.add(scores)
            if (at + 1) % recipe.log_steps == 0:
                now = time.monotonic()
                done += int(window.asked.sum())
                speed = int(window.asked.sum()) / (now - logged)
                journal.progress(at + 1, where, rate(at, where), window, speed, feed.waited)
                window, logged = Tally(miniature.tasks), now
        if saves is not None and recipe.save_steps and step % recipe.save_steps == 0:
            saves.save(step, params, state)
    for _, _, scores in under_way:
        window.add(scores)
    done += int(window.asked.sum())
    journal.progress(step, 1.0, rate(step, 1.0), window, 0.0, feed.waited)
    jax.block_until_ready(params)
    if saves is not None:
        saves.save(step, params, state)
    return Trained(params, step, time.monotonic() - began, feed.waited, done)


def _prepare(miniature: Miniature, recipe: Recipe, programs: Programs) -> None:
    """Begins to compile every program that the training will run, those it begins with first."""
    for tenth in range(11):
        for index in range(_SAMPLED_JOBS):
            programs.prepare("gradients", miniature.program(Job(recipe.seed, index, tenth / 10)))


def _jobs(recipe: Recipe, clock: Clock, step: int) -> Iterator[Job]:
    """The training jobs from `step` on. A job drawn ahead knows the progress of when it is ordered; with a number of
    steps, that of its own step."""
    for index in itertools.count(step // recipe.reuse):
        yield Job(recipe.seed, index, clock.progress(index * recipe.reuse))


def _batches(
    miniature: Miniature, feed: Feed, jobs: Iterator[Job], recipe: Recipe, programs: Programs
) -> Iterator[tuple[Job, str, dict[str, jax.Array]]]:
    """Each batch with its program, on the device one step before it is needed."""

    def announced() -> Iterator[Job]:
        for job in jobs:
            programs.prepare("gradients", miniature.program(job))
            yield job

    def place(pair: tuple[Job, Batch]) -> tuple[Job, str, dict[str, jax.Array]]:
        job, batch = pair
        return job, miniature.program(job), jax.device_put(batch)

    ready = None
    for pair in feed.batches(announced(), recipe.reuse):
        placed = place(pair)
        if ready is not None:
            yield ready
        ready = placed


def evaluate(
    miniature: Miniature,
    params: Params,
    recipe: Recipe,
    feed: Feed,
    programs: Programs,
    time_left: Callable[[], float] = lambda: float("inf"),
) -> dict[str, Tally]:
    """Exact match on every held-out set, with the parameters as the saved file holds them. A set for which no time is
    left is cut short, and its counts say so."""
    saved = rounded(params)
    tallies = {name: Tally(miniature.tasks) for name in miniature.suites}
    most = max((suite.batches for suite in miniature.suites.values()), default=0)
    # Round by round over the sets, so that a cut takes some of each and all of none.
    jobs = [
        Job(recipe.seed, index, 1.0, name)
        for index in range(most * recipe.eval_batches)
        for name, suite in miniature.suites.items()
        if index < suite.batches * recipe.eval_batches
    ]
    for job in jobs:
        programs.prepare("scores", miniature.program(job))
    for job, batch in feed.batches(iter(jobs)):
        if time_left() < 0:
            break
        assert job.suite is not None
        tallies[job.suite].add(programs.scores(saved, jax.device_put(batch), miniature.program(job)))
    return tallies


def passed(miniature: Miniature, tallies: dict[str, Tally]) -> dict[str, bool]:
    """Whether each gated task of each set reaches what it must; one that was never asked does not."""
    return {
        f"{name}/{task}": tally.accuracy().get(task, 0.0) >= least
        for name, tally in tallies.items()
        for task, least in miniature.suites[name].gate.items()
    }
