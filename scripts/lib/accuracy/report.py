"""The gates' rows as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.lib.accuracy.gates import Compared
from scripts.lib.accuracy.statistics import wilson


def as_json(rows: Sequence[Compared], about: dict[str, Any]) -> dict[str, Any]:
    return about | {
        "passed": not any(row.problem for row in rows),
        "rows": [asdict(row) | {"problem": row.problem} for row in rows],
    }


def show(console: Console, rows: Sequence[Compared]) -> None:
    table = Table(title="the same questions, before and after", caption=_CAPTION, padding=(0, 1))
    for name in ("gate", "before", "after"):
        table.add_column(name)
    for name in ("asked", "right", "right", "changed", "lost / gained", "difference, 95 %", "p"):
        table.add_column(name, justify="right")
    table.add_column("")
    last = ("", "")
    for row in rows:
        if last != (row.gate, row.model):
            table.add_section()
            low, high = wilson(row.right_before, row.asked)
            share = f"right before: {100 * low:.0f} to {100 * high:.0f} %"
            table.add_row(f"[bold]{row.gate}[/bold]", f"[bold]{row.model}[/bold]", f"[dim]{share}[/dim]")
            last = row.gate, row.model
        low, high = (100 * end for end in row.interval)
        good = "all the same" if row.equal else "ok"
        verdict = f"[red]{row.problem}[/red]" if row.problem else f"[green]{good}[/green]"
        table.add_row(
            f"[dim]{row.note}[/dim]",
            row.before,
            row.after,
            str(row.asked),
            str(row.right_before),
            str(row.right_after),
            str(row.changed),
            f"{row.lost} / {row.gained}",
            f"{low:+.1f} to {high:+.1f}",
            f"{row.p:.2g}",
            verdict,
        )
    console.print(table)


_CAPTION = (
    "changed: answers of another text, right or wrong; lost, gained: right before alone, after alone; difference: of "
    "the right ones, in points; p: McNemar, exact"
)
