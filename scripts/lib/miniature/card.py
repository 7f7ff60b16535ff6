"""The model card: what it is, how it was made, how good it is."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version

import jax

from scripts.lib.miniature.loop import Trained
from scripts.lib.miniature.spec import Miniature, Recipe
from scripts.lib.miniature.tally import Tally


def interval(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (E. B. Wilson, 1927)."""
    share, spread = right / asked, z * z / asked
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / asked + spread / (4 * asked)) ** 0.5
    return middle - half, middle + half


def accuracy_table(tally: Tally, gate: Mapping[str, float]) -> str:
    lines = ["| task | right | asked | % | 95 % interval | wanted |", "|---|---|---|---|---|---|"]
    for task, (right, asked) in tally.counts().items():
        low, high = interval(right, asked)
        wanted = f"{100 * gate[task]:.0f}" if task in gate else "reported"
        share = f"{100 * right / asked:.2f} | {100 * low:.1f} to {100 * high:.1f}"
        lines.append(f"| {task} | {right} | {asked} | {share} | {wanted} |")
    return "\n".join(lines)


def write_card(
    miniature: Miniature, recipe: Recipe, trained: Trained, tallies: Mapping[str, Tally], count: int, date: str
) -> str:
    """README.md. date: of the training, ISO."""
    said = miniature.card()
    device = jax.devices()[0].device_kind
    parts = [
        f"# {miniature.name}",
        said["summary"],
        f"{count / 1e6:.2f} million parameters, bfloat16. Trained from nothing on {date}.",
        "## Accuracy",
        "Exact match of the whole answer and its end, greedy, with the weights as they are in the file.",
    ]
    for name, tally in tallies.items():
        parts += [f"**{miniature.suites[name].title}**", accuracy_table(tally, miniature.suites[name].gate)]
    if not tallies:
        parts.append("Not measured.")
    settings = ", ".join(f"{key} {value}" for key, value in asdict(recipe).items() if value is not None)
    parts += [
        "## Input",
        said["input"],
        "## Limits",
        said["limits"],
        "## Data",
        said["data"],
        "## Recipe",
        f"`scripts/train_miniature {miniature.name}`: {trained.steps} steps, {trained.questions} questions in "
        f"{trained.seconds:.0f} seconds of training on one {device} (waiting for data: {trained.waited:.0f} s). "
        f"{settings}.",
        f"Python {platform.python_version()}, jax {jax.__version__}, flax {version('flax')}, optax {version('optax')}. "
        "The same seed and number of steps draw the same batches; sums on a GPU may differ in the last bits.",
        "## Licence",
        said["licence"],
    ]
    return "\n\n".join(parts) + "\n"
