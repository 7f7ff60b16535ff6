"""Times the preparation of images, file to patch rows, beside transformers' Pillow image processor.

Needs the project's packages; `scripts/bench_images` brings them, or run this file in an environment of your own.
"""

import argparse
import importlib
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image
from rich.console import Console
from rich.table import Table

from vitbatch.images import ImageProcessor, read_processor
from vitbatch.images.rules import CLIP_MEAN, CLIP_STD
from vitbatch.workers import Workers, usable_cores

SIZES = ["112x112", "224x224", "512x512", "1024x1024", "1920x1080", "2464x2520"]
HALF = [0.5, 0.5, 0.5]
TOWER_FIELDS = ("patch_size", "merge_size", "temporal_patch_size")
# At least this long a sample, so that the clock's own steps do not show.
SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Family:
    """settings: what a released preprocessor_config.json says. module, kind: transformers' class."""

    settings: dict[str, Any]
    module: str
    kind: str


def _family(name: str, kind: str, patch: int, least: int, most: int, **settings: Any) -> Family:
    common = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    normalisation = {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
    bounds = {"size": {"shortest_edge": least, "longest_edge": most}}
    module = f"transformers.models.{name}.image_processing_pil_{name}"
    return Family(common | normalisation | bounds | settings, module, kind)


FAMILIES = {
    "qwen3_vl": _family("qwen2_vl", "Qwen2VLImageProcessor", 16, 65536, 16777216, image_mean=HALF, image_std=HALF),
    "qwen2_5_vl": _family("qwen2_vl", "Qwen2VLImageProcessor", 14, 3136, 12845056),
    "glm46v": _family("glm46v", "Glm46VImageProcessor", 14, 12544, 9633792),
    "glm5_next": _family(
        "glm5_next",
        "Glm5NextImageProcessor",
        14,
        0,
        0,
        size={"longest_edge": 1},
        min_image_tokens=16,
        max_image_tokens=8000,
    ),
}


@dataclass
class Row:
    """Medians of one size. cpu_ms: processor time an image, one thread. alone, together: images a second with one
    worker and with all of them; cores: processor time over elapsed time with all of them."""

    size: str
    tokens: int
    cpu_ms: float
    reference_cpu_ms: float | None
    alone: float
    together: float
    cores: float
    reference_alone: float | None
    reference_together: float | None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the reference on one core."""
        return None if self.reference_cpu_ms is None else self.reference_cpu_ms / self.cpu_ms


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_images",
        description=(
            "Prepares pictures made in place, file to patch rows: on one core, and with one worker and several. The "
            "sides take turns, and medians are printed. Processor time is what to compare on a busy machine. "
            "transformers' side makes what its model reads (normalised float32, both frames), ours what the encoder "
            "reads (uint8, one frame; the device does the rest); before timing, the pixels are compared."
        ),
        epilog="example: scripts/bench_images --reference --family glm5_next --sizes 512x512 1080x1920",
    )
    parser.add_argument("--reference", action="store_true", help="install transformers (extra goldens) to compare with")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_vl", help="default: %(default)s")
    parser.add_argument("--sizes", nargs="+", metavar="HxW", default=SIZES, help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--format", choices=["JPEG", "PNG", "WEBP"], default="JPEG", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every side; default: %(default)s")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="default: one a core (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args(arguments)


def picture(size: str, kind: str) -> bytes:
    """A file of smooth colours with some texture, about as large as a photograph's."""
    h, w = map(int, size.split("x"))
    y, x = np.linspace(0, 1, h)[:, None, None], np.linspace(0, 1, w)[None, :, None]
    colours = 120 + 90 * np.sin(7 * x + np.arange(3)) * np.cos(5 * y) + np.random.default_rng(0).normal(0, 9, (h, w, 3))
    buffer = io.BytesIO()
    Image.fromarray(colours.clip(0, 255).astype(np.uint8)).save(buffer, kind, quality=90)
    return buffer.getvalue()


def reference_of(family: Family) -> Callable[[bytes], Any] | None:
    """transformers' preparation of a file, or None where it is not installed."""
    try:
        kind = getattr(importlib.import_module(family.module), family.kind + "Pil")
        load_image = importlib.import_module("transformers.image_utils").load_image
    except ImportError:
        return None
    processor = kind(**family.settings)
    return lambda data: processor(load_image(Image.open(io.BytesIO(data))), return_tensors="np")


def check_equal(processor: ImageProcessor, reference: Callable[[bytes], Any], data: bytes) -> None:
    """Raises SystemExit when the two sides do not make the same pixels: their times would say nothing."""
    ours, theirs = processor.prepare(data), reference(data)
    if ours.grid_thw != (grid := tuple(theirs["image_grid_thw"][0])):
        raise SystemExit(f"error: our grid is {ours.grid_thw}, transformers' {grid}; is this the same rule?")
    pixels = ours.patches.reshape(len(ours.patches), 3, 1, -1) / np.float32(255)
    mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (processor.mean, processor.std))
    want = np.asarray(theirs["pixel_values"]).reshape(len(pixels), 3, processor.temporal_patch_size, -1)
    error = np.abs((pixels - mean) / std - want).max()
    if error > 1e-5:
        raise SystemExit(f"error: the pixels differ by up to {error:g}; is this the same rule?")


def cpu_seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, over as many calls as make a sample."""
    calls, begin = 0, time.process_time()
    while (spent := time.process_time() - begin) < SAMPLE_SECONDS or not calls:
        work()
        calls += 1
    return spent / calls


def images_a_second(work: Callable[[bytes], object], data: bytes, count: int, workers: Workers) -> tuple[float, float]:
    """(images a second, processor time over elapsed time) for `count` images."""
    begin, cpu = time.perf_counter(), time.process_time()
    for done in workers.each(work, [data] * count):
        done.result()
    elapsed = time.perf_counter() - begin
    return count / elapsed, (time.process_time() - cpu) / elapsed


def measure(size: str, processor: ImageProcessor, reference: Callable[[bytes], Any] | None, args: Any) -> Row:
    data = picture(size, args.format)
    sides: list[Callable[[bytes], Any]] = [processor.prepare]
    if reference is not None:
        check_equal(processor, reference, data)
        sides.append(reference)
    tokens = processor.prepare(data).num_tokens
    cpu: list[list[float]] = [[] for _ in sides]
    rates: list[list[tuple[float, float, float]]] = [[] for _ in sides]
    with Workers(1) as alone, Workers(args.workers) as together:
        for _ in range(args.rounds):
            for side, work in enumerate(sides):
                cpu[side].append(cpu_seconds(lambda work=work: work(data)))
                # Enough for every worker to start and end with the others.
                count = args.workers * max(2, min(32, round(0.1 / cpu[side][-1])))
                one, _ = images_a_second(work, data, count, alone)
                rates[side].append((one, *images_a_second(work, data, count, together)))
    times = [statistics.median(values) * 1e3 for values in cpu]
    medians = [[statistics.median(column) for column in zip(*values, strict=True)] for values in rates]
    alone_rate, together_rate, cores = medians[0]
    compared = reference is not None
    return Row(
        size,
        tokens,
        times[0],
        times[1] if compared else None,
        alone_rate,
        together_rate,
        cores,
        medians[1][0] if compared else None,
        medians[1][1] if compared else None,
    )


def table(rows: list[Row], title: str, workers: int) -> Table:
    made = Table(title=title)
    columns = ["size (HxW)", "tokens", "ms CPU", "transformers", "times as fast", "images/s, 1 worker"]
    columns += [f"{workers} workers", "gain", "cores busy", f"transformers, 1 / {workers} workers"]
    for name in columns:
        made.add_column(name, justify="right")
    for row in rows:
        theirs = ("-", "-") if row.ratio is None else (f"{row.reference_cpu_ms:.2f}", f"{row.ratio:.1f}")
        rates = "-" if row.reference_alone is None else f"{row.reference_alone:.1f} / {row.reference_together:.1f}"
        gain = f"{row.together / row.alone:.2f}"
        figures = [f"{row.cpu_ms:.2f}", *theirs, f"{row.alone:.1f}", f"{row.together:.1f}", gain, f"{row.cores:.2f}"]
        made.add_row(row.size, str(row.tokens), *figures, rates)
    return made


def load_average() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    family = FAMILIES[args.family]
    tower = {name: family.settings[name] for name in TOWER_FIELDS}
    processor = read_processor(family.settings | {"image_processor_type": family.kind}, **tower)
    reference = reference_of(family)
    console, before = Console(), load_average()
    if reference is None:
        console.print("transformers 5 is not installed here: our side only (--reference installs it)")
    rows = []
    with console.status("measuring") as status:
        for size in args.sizes:
            status.update(f"measuring {size}")
            rows.append(measure(size, processor, reference, args))
    versions = f"Python {platform.python_version()}, Pillow {PIL.__version__}, numpy {np.__version__}"
    if reference is not None:
        versions += f", transformers {importlib.import_module('transformers').__version__}"
    load = "unknown" if before is None else f"{before:.1f} before, {load_average():.1f} after"
    console.print(table(rows, f"{args.family}, {args.format}, medians of {args.rounds}", args.workers), highlight=False)
    console.print(f"{versions}; {usable_cores()} cores, load average {load}", highlight=False)
    if args.json:
        figures = [asdict(row) for row in rows]
        args.json.write_text(json.dumps({"family": args.family, "versions": versions, "load": load, "rows": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
