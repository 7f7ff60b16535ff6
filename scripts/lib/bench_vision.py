"""Times a vision tower: request by request against all at once, one lane against several, beside transformers' tower.

Needs the project's packages; `scripts/bench_vision` brings them, or run this file in an environment of your own. The
rival needs torch and transformers as well, and is left out where they are absent.
"""

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from scripts.lib.made_up_tower import TowerSize, add_size_options, size_of, write_checkpoint
from scripts.lib.tower_rates import TowerRates, on_a_gpu
from vitbatch import EncoderConfig, Frame, VisionEncoder, WarmupReport
from vitbatch.checkpoint import bind_tower
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, load, save_orbax
from vitstripe.platform import platform_of

Grid = tuple[int, int]
GRIDS = ("4x4", "6x6", "8x8", "16x16", "24x40", "32x32", "64x64")
# A call's worth of each size: enough images to batch, not so many that a round takes long.
PATCHES, MOST_IMAGES, LEAST_IMAGES = {"cpu": 4096, "gpu": 65536}, 64, 3

# Photographs and screens, at 16 px a patch, some of them twice.
MIX: tuple[Grid, ...] = (
    (30, 40),
    (32, 32),
    (48, 64),
    (44, 80),
    (68, 84),
    (84, 68),
    (16, 16),
    (32, 32),
    (4, 4),
    (64, 48),
)


def interleaved(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each; a round runs all of them, so that what slows the machine slows them all."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for each in work.values():
        each()
    for _ in range(rounds):
        for name, each in work.items():
            begin = time.perf_counter()
            each()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


@dataclass(frozen=True)
class Speed:
    """Images a second by each way (median of the rounds), and ratios of the rounds' own times (median)."""

    grid: str
    images: int
    calls: int
    padding: float
    per_request: float
    batched: float
    batched_gain: float
    lanes: float | None
    lanes_gain: float | None
    rival_per_request: float | None
    rival: float | None
    rival_gain: float | None


def frames_of(grids: Sequence[Grid], features: int, seed: int = 0) -> list[Frame]:
    draw = np.random.default_rng(seed)
    return [Frame(draw.integers(0, 256, (gh * gw, features), dtype=np.uint8), (gh, gw)) for gh, gw in grids]


def measure(
    grid: Grid, one: VisionEncoder, many: VisionEncoder | None, rival: Any, *, images: int, rounds: int
) -> Speed:
    """Speeds of `images` images of one grid."""
    frames = frames_of([grid] * images, one.vision_config.patch_pixels)
    work: dict[str, Callable[[], object]] = {
        "per_request": lambda: [one.encode_frames([frame]) for frame in frames],
        "batched": lambda: one.encode_frames(frames),
    }
    if many is not None:
        work["lanes"] = lambda: many.encode_frames(frames)
    if rival is not None:
        rows = np.concatenate([frame.rows for frame in frames])
        work["rival_per_request"] = lambda: [rival.encode(frame.rows, [grid]) for frame in frames]
        work["rival"] = lambda: rival.encode(rows, [grid] * images)
    seconds = interleaved(work, rounds)

    def rate(name: str) -> float | None:
        return images / statistics.median(seconds[name]) if name in seconds else None

    def gain(name: str, over: str) -> float | None:
        if name not in seconds or over not in seconds:
            return None
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[over], strict=True))

    plans = one._plan([grid[0] * grid[1]] * images)
    computed = sum(plan.lanes * plan.capacity for plan in plans)
    return Speed(
        grid=f"{grid[0]}x{grid[1]}",
        images=images,
        calls=len(plans),
        padding=1 - images * grid[0] * grid[1] / computed,
        per_request=rate("per_request") or 0.0,
        batched=rate("batched") or 0.0,
        batched_gain=gain("batched", "per_request") or 0.0,
        lanes=rate("lanes"),
        lanes_gain=gain("lanes", "batched"),
        rival_per_request=rate("rival_per_request"),
        rival=rate("rival"),
        rival_gain=gain("batched", "rival"),
    )


def speed_table(speeds: Sequence[Speed], title: str, lanes: int) -> Table:
    table = Table(title=title, box=SIMPLE)
    heads = ["grid", "images", "calls", "padding", "alone", "batched", "gain", f"{lanes} lanes", "gain"]
    heads += ["rival alone", "batched", "ours/rival"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)

    def text(value: float | None, suffix: str = "") -> str:
        return "-" if value is None else f"{value:.2f}{suffix}" if value < 100 else f"{value:.0f}{suffix}"

    for s in speeds:
        table.add_row(
            s.grid,
            str(s.images),
            str(s.calls),
            f"{s.padding:.0%}",
            *(text(s.per_request), text(s.batched), text(s.batched_gain, "x")),
            *(text(s.lanes), text(s.lanes_gain, "x")),
            *(text(s.rival_per_request), text(s.rival), text(s.rival_gain, "x")),
        )
    return table


@dataclass(frozen=True)
class Cosine:
    """Between the rows of two ways to encode the same images."""

    mean: float
    least: float
    rows: int


def cosine(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> Cosine:
    a, b = (np.concatenate(rows).astype(np.float64) for rows in (got, want))
    values = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return Cosine(float(values.mean()), float(values.min()), len(values))


def cosines(folder: Path, config: EncoderConfig) -> dict[str, Cosine]:
    """bfloat16 rows, batched: against those of one call a request, and against float32."""

    def encoder(dtype) -> VisionEncoder:
        made = EncoderConfig(**{**vars(config), "dtype": dtype})
        return VisionEncoder.from_checkpoint(folder, mesh=make_mesh(1), config=made)

    half = encoder(jnp.bfloat16)
    largest = half.ladder.largest
    frames = frames_of([g for g in MIX if g[0] * g[1] <= largest], half.vision_config.patch_pixels, seed=1)
    together = half.encode_frames(frames)
    alone = [half.encode_frames([frame])[0] for frame in frames]
    del half
    exact = encoder(jnp.float32).encode_frames(frames)
    return {"per request": cosine(together, alone), "float32": cosine(together, exact)}


def loading_seconds(folder: Path, scratch: Path) -> dict[str, float]:
    """How long the tower takes from the Hugging Face folder and from an Orbax copy of it; medians of three."""
    mesh, source = make_mesh(1), Checkpoint(folder)
    dtype = platform_of(jax.devices()[0]).default_dtype
    save_orbax(scratch / "orbax", source, {"vision": load(source, bind_tower(source, dtype=dtype), mesh)})

    def restore(path: Path) -> None:
        opened = Checkpoint(path)
        jax.block_until_ready(load(opened, bind_tower(opened, dtype=dtype), mesh))

    work = {"conversion": lambda: restore(folder), "Orbax copy": lambda: restore(scratch / "orbax")}
    return {name: statistics.median(seconds) for name, seconds in interleaved(work, 3).items()}


def warmed(folder: Path, lanes: int, config: EncoderConfig, console: Console) -> tuple[VisionEncoder, WarmupReport]:
    encoder = VisionEncoder.from_checkpoint(folder, mesh=make_mesh(lanes), config=config)
    with console.status("warming up") as status:
        report = encoder.warm_up(lambda done, total, name: status.update(f"warming up: {done} of {total} ({name})"))
    return encoder, report


def rival_of(folder: Path, wanted: bool, console: Console) -> Any:
    if not wanted:
        return None
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        console.print(f"without transformers' tower: {' and '.join(absent)} not installed")
        return None
    from scripts.lib.rival_tower import RivalTower

    rival = RivalTower(folder)
    if (rival.device == "cpu") != (jax.devices()[0].platform == "cpu"):
        console.print(
            f"without transformers' tower: torch has a {rival.device} device, jax {jax.devices()[0].platform}"
        )
        return None
    return rival


def grid_of(text: str) -> Grid:
    rows, _, columns = text.partition("x")
    if not (rows.isdigit() and columns.isdigit()) or int(rows) % 2 or int(columns) % 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no grid of even patch counts like 16x24")
    return int(rows), int(columns)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_vision",
        description="Times a vision tower with random weights on this machine: images a second request by request and "
        "batched, on one lane and on several, beside transformers' tower where torch is installed; warm-up cold and "
        "from the disk cache; loading. On a GPU also how near its own limits the tower runs, beside torch. The ways of "
        "a row are run in turn, round by round.",
        epilog="example: scripts/bench_vision --width 1152 --depth 27 --cosine",
    )
    add_size_options(parser)
    parser.add_argument("--grids", type=grid_of, nargs="+", default=[grid_of(g) for g in GRIDS], metavar="ROWSxCOLUMNS")
    parser.add_argument("--images", type=int, help="images of each grid (default: by size, 3 to 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lanes", type=int, help="devices of the several lanes (default: all; 2 on a CPU)")
    parser.add_argument("--cosine", action="store_true", help="compare bfloat16 rows batched, alone and in float32")
    parser.add_argument("--no-speed", action="store_true", help="leave the table of speeds out")
    parser.add_argument("--no-limits", action="store_true", help="on a GPU: leave its limits and torch out")
    parser.add_argument("--no-start-up", action="store_true", help="leave warm-up and loading out")
    parser.add_argument("--no-rival", action="store_true", help="leave transformers' tower out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    # From the smallest default grid, so that there are tiny lanes, to the largest, so that a CPU compiles few buckets.
    parser.set_defaults(min_pixels=4 * 4 * 256, max_pixels=64 * 64 * 256)
    return parser.parse_args(arguments)


def start_up(folder: Path, scratch: Path, console: Console) -> tuple[VisionEncoder, dict[str, Any]]:
    """A warmed encoder, and what getting there took."""
    cached = EncoderConfig(compilation_cache=scratch / "programs")
    one, cold = warmed(folder, 1, cached, console)
    _, warm = warmed(folder, 1, cached, console)
    console.print(str(cold))
    sources = sorted({bucket.source for bucket in warm.buckets})
    console.print(f"warm-up: {cold.seconds:.1f} s cold, {warm.seconds:.1f} s the second time ({' and '.join(sources)})")
    loading = loading_seconds(folder, scratch)
    console.print("loading: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in loading.items()))
    figures = {"buckets": len(cold.buckets), "cold": cold.seconds, "from_disk": warm.seconds, "sources": sources}
    return one, {"warm_up": figures, "loading": loading}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    logging.getLogger("absl").setLevel(logging.WARNING)
    jax.config.update("jax_num_cpu_devices", args.lanes or 2)
    # Of a GPU's memory, so that torch has the rest.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    console = Console() if sys.stdout.isatty() else Console(width=120)
    device = platform_of(jax.devices()[0])
    lanes = args.lanes or len(jax.devices())
    size: TowerSize = size_of(args)
    title = f"{size.depth} x {size.width}, {device.name or device.kind}, jax {jax.__version__}"
    figures: dict[str, Any] = {"tower": asdict(size), "device": asdict(device), "jax": jax.__version__, "lanes": lanes}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch) / "tower", size)
        if args.no_start_up:
            one = VisionEncoder.from_checkpoint(folder, mesh=make_mesh(1))
        else:
            one, started = start_up(folder, Path(scratch), console)
            figures |= started
        if not args.no_speed:
            many = VisionEncoder.from_checkpoint(folder, mesh=make_mesh(lanes)) if lanes > 1 else None
            rival = rival_of(folder, not args.no_rival, console)
            speeds = []
            for grid in args.grids:
                patches = grid[0] * grid[1]
                by_size = PATCHES["cpu" if device.kind == "cpu" else "gpu"] // patches
                images = args.images or max(LEAST_IMAGES, min(MOST_IMAGES, by_size))
                speeds.append(measure(grid, one, many, rival, images=images, rounds=args.rounds))
                print(f"  {speeds[-1].grid}: {speeds[-1].batched:.1f} images/s batched", file=sys.stderr, flush=True)
            rivals = "" if rival is None else f"; rival: {rival.name}"
            busy = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
            console.print(speed_table(speeds, f"images a second: {title}{busy}{rivals}", lanes))
            figures["speed"] = [asdict(speed) for speed in speeds]
        if on_a_gpu() and not args.no_limits:
            rates = TowerRates(folder, size, console)
            rates.run()
            console.print(f"floor: {rates.flops / 1e12:.0f} TFLOP/s in an 8192^3 product")
            console.print(rates.table())
            figures["limits"] = {
                "floor": rates.flops,
                "products": [{"shape": shape, "seconds": seconds} for shape, seconds in rates.products.items()],
                "rates": [asdict(rate) for rate in rates.rates],
            }
        if args.cosine:
            del one
            found = cosines(folder, EncoderConfig())
            for name, value in found.items():
                console.print(f"bfloat16 batched against {name}: cosine {value.mean:.6f} mean, {value.least:.6f} least")
            figures["cosine"] = {name: asdict(value) for name, value in found.items()}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
