"""What a training says while it runs: lines, a bar on a terminal, a file of JSON lines, plots at the end."""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.lib.miniature.tally import Tally, as_text


class Journal:
    """file: JSON lines, one an entry, appended to; None for none."""

    def __init__(self, file: Path | None, began: float):
        self._file, self._began = file, began
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self._console, transient=True
        )
        self._task = self._bar.add_task("starting", total=1.0)
        # Redrawn lines are of no use in a log.
        if self._console.is_terminal:
            self._bar.start()
        self.entries: list[dict[str, Any]] = []
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self._console.print(f"{self.seconds():6.1f} s  {text}")

    def write(self, kind: str, **values: Any) -> None:
        entry = {"kind": kind, "seconds": round(self.seconds(), 2), **values}
        self.entries.append(entry)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(entry) + "\n")

    def progress(self, step: int, progress: float, rate: float, window: Tally, speed: float, waited: float) -> None:
        """One line about the steps since the last: fresh batches, so this accuracy is of questions never seen."""
        self._bar.update(self._task, completed=progress, description=f"step {step}  loss {window.loss:.3f}")
        accuracy, extras = window.accuracy(), window.extras()
        self.say(
            f"step {step:6d} {100 * progress:3.0f} %  loss {window.loss:.4f}  rate {rate:.2e}  "
            f"{speed:.0f} questions/s  waited {waited:.0f} s  | {as_text(accuracy)}"
            + "".join(f"  {name} {value:.4g}" for name, value in extras.items())
        )
        self.write(
            "steps", step=step, progress=round(progress, 4), loss=window.loss, rate=rate, questions_per_second=speed,
            waited=round(waited, 1), accuracy=accuracy, **extras,
        )  # fmt: skip

    def close(self) -> None:
        self._bar.stop()


def plot(entries: list[dict[str, Any]], file: Path) -> bool:
    """Loss and accuracy over the steps, as a PNG. False, and no file, without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    points = [entry for entry in entries if entry["kind"] == "steps"]
    steps = [entry["step"] for entry in points]
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    loss.plot(steps, [entry["loss"] for entry in points])
    loss.set(xlabel="step", ylabel="loss", yscale="log")
    for task in sorted({task for entry in points for task in entry["accuracy"]}):
        known = [(entry["step"], entry["accuracy"][task]) for entry in points if task in entry["accuracy"]]
        accuracy.plot(*zip(*known, strict=True), label=task)
    accuracy.set(xlabel="step", ylabel="exact match on fresh questions", ylim=(0, 1.01))
    if accuracy.get_lines():
        accuracy.legend(fontsize="small")
    figure.savefig(file, dpi=100)
    return True
