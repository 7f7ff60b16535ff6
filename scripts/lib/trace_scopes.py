"""Reads a profiler trace back: device time by named scope, gaps, and the host's share and its parts.

A trace names the compiled operation of every event; which scope an operation belongs to stands in the compiled program
(`jax.named_scope` ends up in each operation's name). So the programs that ran are given along with the trace.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import jax

SCOPES = (
    *("encode", "splice", "project", "score", "select", "merge", "attend", "short_conv", "delta_rule", "mixer"),
    *("mlp", "logits", "sample"),
)
"""Parts of a step on the devices, in the order they run. The innermost one that an operation's name holds counts:
`mixer` is what a decoder layer's attention or recurrence has beside the parts named before it, its projections above
all."""

HOST_SCOPES = ("plan", "collect")
"""What the host does around them: plan calls and passes, and wait for and tell what a pass gave."""

OTHER = "other"

Intervals = list[tuple[float, float]]

# Their events span those of the operations inside them.
_CONTAINERS = re.compile(r"(while|conditional|call|async-start|async-done)\b")


def scopes_of(programs: Iterable[jax.stages.Compiled]) -> dict[tuple[str, str], str]:
    """(module, operation) -> scope, of every operation of the programs."""
    found: dict[tuple[str, str], str] = {}
    for program in programs:
        text = program.as_text() or ""
        module = re.search(r"HloModule ([\w.\-]+)", text)
        for operation, name in re.findall(r"%?([\w.\-]+) = [^\n]*?op_name=\"([^\"]*)\"", text):
            found[module[1] if module else "", operation] = scope_in(name)
    return found


def scope_in(op_name: str) -> str:
    """The innermost scope of an operation's name, such as "jit(run)/shard_map/select/top_k"."""
    parts = re.split(r"[/()]", op_name)
    return next((part for part in reversed(parts) if part in SCOPES), OTHER)


@dataclass
class Section:
    """What one kind of step did, summed over its runs. Seconds; busy: by device, the union of its operations' times.

    scopes: device seconds by scope, all devices together. operations: (scope, operation) likewise. gaps: by device, the
    stretches in which it did nothing, longest first. host: seconds by HOST_SCOPES.
    """

    name: str
    runs: int
    wall: float
    busy: dict[str, float] = field(default_factory=dict)
    scopes: dict[str, float] = field(default_factory=dict)
    operations: dict[tuple[str, str], float] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)

    @property
    def host_share(self) -> float:
        """Share of the time in which not even the busiest device computed: it waited for the host."""
        return 1 - max(self.busy.values(), default=0.0) / self.wall if self.wall else 0.0


def _union(intervals: Intervals) -> Intervals:
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def read_section(folder: Path, name: str, programs: Sequence[jax.stages.Compiled], *, annotation: str) -> Section:
    """Reads the newest trace in `folder`.

    annotation: the name of the host annotation around each run; what lies outside of one is not counted. Raises
    ValueError where the trace holds no such annotation.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"{folder} holds no trace")
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    runs = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in planes
        for line in plane.lines
        for event in line.events
        if event.name == annotation
    ]
    if not runs:
        raise ValueError(f"{files[-1]} holds no annotation {annotation!r}")
    first, last = min(begin for begin, _ in runs), max(end for _, end in runs)
    section = Section(name, len(runs), sum(end - begin for begin, end in runs) * 1e-9)
    scopes, seen = scopes_of(programs), defaultdict[str, Intervals](list)
    by_scope, by_operation = defaultdict[str, float](float), defaultdict[tuple[str, str], float](float)
    by_host = defaultdict[str, float](float)
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                if not (event.duration_ns > 0 and first <= event.start_ns < last):
                    continue
                if event.name in HOST_SCOPES:
                    by_host[event.name] += event.duration_ns * 1e-9
                    continue
                stats = {key: value for key, value in event.stats if key in ("hlo_op", "hlo_module", "device_ordinal")}
                operation = _operation(stats)
                if operation is None or _CONTAINERS.match(operation[1]):
                    continue
                device = f"{plane.name}:{stats['device_ordinal']}" if "device_ordinal" in stats else plane.name
                seen[device].append((event.start_ns, event.start_ns + event.duration_ns))
                scope = _scope(operation, scopes)
                by_scope[scope] += event.duration_ns * 1e-9
                by_operation[scope, operation[1]] += event.duration_ns * 1e-9
    for device, intervals in seen.items():
        merged = _union(intervals)
        section.busy[device] = sum(end - begin for begin, end in merged) * 1e-9
        between = [b[0] - a[1] for a, b in pairwise(merged)]
        section.gaps[device] = sorted((gap * 1e-9 for gap in between), reverse=True)
    section.scopes, section.operations, section.host = dict(by_scope), dict(by_operation), dict(by_host)
    return section


def _operation(stats: Mapping[str, object]) -> tuple[str, str] | None:
    """(module, operation) of a device event; None for anything else."""
    if "hlo_op" not in stats:
        return None
    return str(stats.get("hlo_module", "")), str(stats["hlo_op"])


def _scope(operation: tuple[str, str], scopes: Mapping[tuple[str, str], str]) -> str:
    module, name = operation
    # A trace may give the module a number that its program lacks.
    for candidate in (module, re.sub(r"[.(]\d+\)?$", "", module)):
        if (candidate, name) in scopes:
            return scopes[candidate, name]
    return OTHER
