"""How near a GPU's own limits a tower runs, and beside what a user would pick instead: one call, one image a call, and
a burst of mixed photographs.

parts bound: the work's matrix products, by shape, and its attention, each timed alone in the same run, added up.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from scripts.lib.bench_kernels import compiled, median_seconds, normal, normals, rotated, segments_of
from scripts.lib.made_up_tower import TowerSize
from vitbatch import Bucket, EncoderConfig, Frame, VisionEncoder, Workers
from vitbatch.attention import attend
from vitbatch.planning import plan_call
from vitstripe import make_mesh
from vitstripe.platform import default_platform

SIDE, IMAGES = 32, 64
"""Patches a side of the images of the first two kinds of work, and how many of them there are."""

BURST = [(112, 112)] * 6 + [(512, 512)] * 6 + [(1024, 1024)] * 6 + [(1080, 1920)] * 4 + [(2520, 2464)] * 3
ROUNDS = 5


@dataclass(frozen=True)
class Rate:
    """seconds: median, of all the work. flops: useful ones. parts, floor: seconds at best, by the parts bound and at
    the rate of an 8192^3 product; 0 where they say nothing."""

    work: str
    what: str
    seconds: float
    images: int
    flops: float
    parts: float
    floor: float


def tower_flops(size: TowerSize, lengths: Sequence[int]) -> float:
    rows, width = sum(lengths), size.width
    blocks = 2 * rows * (4 * width**2 + 2 * width * size.mlp) + 4 * sum(n * n for n in lengths) * width
    merger = 2 * (rows / 4) * (16 * width**2 + 4 * width * size.out)
    return size.depth * blocks + 2 * rows * 6 * size.patch**2 * width + (1 + size.deepstack) * merger


def matmul_shapes(size: TowerSize, rows: int) -> list[tuple[int, tuple[int, int, int]]]:
    """How often a tower multiplies [rows, in] by [out, in]."""
    width, mergers = size.width, 1 + size.deepstack
    return [
        (1, (rows, 6 * size.patch**2, width)),
        (size.depth, (rows, width, 3 * width)),
        (size.depth, (rows, width, width)),
        (size.depth, (rows, width, size.mlp)),
        (size.depth, (rows, size.mlp, width)),
        (mergers, (rows // 4, 4 * width, 4 * width)),
        (mergers, (rows // 4, 4 * width, size.out)),
    ]


def product_seconds(shape: tuple[int, int, int]) -> float:
    rows, inputs, outputs = shape
    sets = rotated(
        lambda i: (normal(2 * i, (rows, inputs), jnp.bfloat16), normal(2 * i + 1, (outputs, inputs), jnp.bfloat16))
    )
    dims = (((1,), (1,)), ((), ()))
    return median_seconds(compiled(partial(lax.dot_general, dimension_numbers=dims), sets[0]), sets, 10)


def attention_seconds(size: TowerSize, lengths: Sequence[int]) -> float:
    segments = segments_of(sorted(lengths, reverse=True))
    shape = (64 * segments.first.shape[0], size.heads, size.width // size.heads)
    sets = rotated(partial(normals, shape=shape))
    return median_seconds(compiled(partial(attend, segments=segments), sets[0]), sets, 5)


SQUARE = 8192


class TowerRates:
    """Times the kinds of work one after the other; one that fails is reported and does not lose the others."""

    def __init__(self, folder: Path, size: TowerSize, console: Console):
        self.folder, self.size, self.console = folder, size, console
        self.rates: list[Rate] = []
        square = rotated(lambda i: tuple(normal(2 * i + j, (SQUARE, SQUARE), jnp.bfloat16) for j in range(2)))
        self.flops = 2 * SQUARE**3 / median_seconds(compiled(lambda a, b: a @ b, square[0]), square, 10)
        rows = IMAGES * SIDE**2
        shapes = matmul_shapes(size, rows)
        self.products = {shape: product_seconds(shape) for _, shape in shapes}
        self.row_seconds = sum(count * self.products[shape] for count, shape in shapes) / rows
        for shape, seconds in self.products.items():
            say = f"{shape[0]} x {shape[1]} x {shape[2]}: {1e3 * seconds:.3f} ms"
            self.console.print(f"product {say}, {2 * math.prod(shape) / seconds / 1e12:.0f} TFLOP/s")

    def run(self) -> None:
        for work in (self.one_call, self.one_image_a_call, self.burst, self.transformers, self.graphs, self.compiled):
            begin = time.perf_counter()
            try:
                work()
            except Exception as error:
                self.console.print(f"{work.__name__}: {type(error).__name__}: {str(error)[:300]}")
            self.console.print(f"({work.__name__} took {time.perf_counter() - begin:.0f} s)", style="dim")

    def add(self, work: str, what: str, seconds: float, lengths: Sequence[int], parts: float = 0.0) -> None:
        flops = tower_flops(self.size, lengths)
        self.rates.append(Rate(work, what, seconds, len(lengths), flops, parts, flops / self.flops))
        self.console.print(f"{work}, {what}: {1e3 * seconds:.2f} ms, {flops / seconds / 1e12:.0f} TFLOP/s")

    def parts_bound(self, lengths: Sequence[int]) -> float:
        attention = self.size.depth * attention_seconds(self.size, lengths)
        self.console.print(f"attention alone: {1e3 * attention / self.size.depth:.3f} ms a block")
        return sum(lengths) * self.row_seconds + attention

    def encoder(self, **config: Any) -> VisionEncoder:
        return VisionEncoder.from_checkpoint(self.folder, mesh=make_mesh(1), config=EncoderConfig(**config))

    def one_call(self) -> None:
        lengths = [SIDE**2] * IMAGES
        seconds = device_seconds(self.encoder(), lengths, 4)
        self.add("one call", "ours", seconds, lengths, self.parts_bound(lengths))

    def one_image_a_call(self) -> None:
        encoder = self.encoder(max_call_patches=SIDE**2)
        seconds = device_seconds(encoder, [SIDE**2], 40)
        self.add("one image a call", "ours, inputs on the device", seconds, [SIDE**2])
        frames = frames_of(encoder, [SIDE**2] * IMAGES)
        seconds = median_rounds(lambda: encoder.encode_frames(frames))
        self.add("one image a call", "ours, host to host", seconds, [SIDE**2] * IMAGES)

    def burst(self) -> None:
        encoder, draw = self.encoder(), np.random.default_rng(0)
        pictures = [draw.integers(0, 256, (*BURST[i], 3), dtype=np.uint8) for i in draw.permutation(len(BURST))]
        prepared = [encoder.processor.prepare(picture) for picture in pictures]
        lengths = [len(image.patches) for image in prepared]
        parts = self.parts_bound(lengths)
        plans = list(encoder._bursts(Frame(image.patches, image.grid_thw[1:]) for image in prepared))
        computed = sum(plan.capacity for plan, _ in plans)
        self.console.print(
            f"burst of {len(lengths)} images, {sum(lengths)} patches, in lanes of "
            f"{[plan.capacity for plan, _ in plans]}: {1 - sum(lengths) / computed:.1%} padding"
        )
        seconds = median_rounds(lambda: encoder.encode(prepared), 3)
        self.add("burst", "ours, from patches", seconds, lengths, parts)
        seconds = median_rounds(lambda: encoder.encode(pictures), 3)
        with Workers() as workers:
            self.add("burst", f"ours, from RGB, {workers.threads} workers", seconds, lengths, parts)
        begin = time.perf_counter()
        for picture in pictures:
            encoder.processor.prepare(picture)
        self.console.print(f"its preparation by one thread: {time.perf_counter() - begin:.2f} s")

    def transformers(self) -> None:
        if self.absent("torch", "transformers"):
            return
        import torch

        from scripts.lib.rival_tower import RivalTower

        rival = RivalTower(self.folder)
        for work, images in (("one call", IMAGES), ("one image a call", 1)):
            rows = images * SIDE**2
            pixels = torch.randn(rows, 6 * self.size.patch**2, device="cuda", dtype=rival.dtype)
            grids = torch.tensor([(1, SIDE, SIDE)] * images, device="cuda")
            seconds = torch_seconds(partial(rival.tower, pixels, grid_thw=grids), 3)
            self.add(work, rival.name, seconds, [SIDE**2] * images)

    def graphs(self) -> None:
        if self.absent("torch"):
            return
        import torch

        from scripts.lib.torch_stack import stack_and_inputs

        stack, inputs = stack_and_inputs(self.size, 1, SIDE**2)
        with torch.inference_mode():
            torch_seconds(partial(stack, *inputs), 3)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                stack(*inputs)
        self.add("one image a call", "torch, plain stack, CUDA graph", torch_seconds(graph.replay, 20), [SIDE**2])

    def compiled(self) -> None:
        if self.absent("torch"):
            return
        import torch

        from scripts.lib.torch_stack import stack_and_inputs

        stack, inputs = stack_and_inputs(self.size, IMAGES, SIDE**2)
        seconds = torch_seconds(partial(torch.compile(stack, dynamic=False), *inputs), 3)
        self.add("one call", "torch.compile, plain stack, batched sdpa", seconds, [SIDE**2] * IMAGES)

    def absent(self, *names: str) -> bool:
        missing = [name for name in names if find_spec(name) is None]
        if missing:
            self.console.print(f"not installed: {' and '.join(missing)}")
        return bool(missing)

    def table(self) -> Table:
        table = Table(title="beside the limits of the GPU and what else there is", box=SIMPLE)
        for head in ("work", "what", "ms", "images/s", "TFLOP/s", "parts bound", "floor", "ours is"):
            table.add_column(head, justify="left" if head in ("work", "what") else "right")
        for rate in sorted(self.rates, key=lambda rate: rate.work, reverse=True):
            ours = next(r for r in self.rates if r.work == rate.work)
            a_second = rate.images / rate.seconds
            table.add_row(
                rate.work,
                rate.what,
                f"{1e3 * rate.seconds:.2f}",
                f"{a_second:.1f}",
                f"{rate.flops / rate.seconds / 1e12:.0f}",
                f"{rate.parts / rate.seconds:.0%}" if rate.parts else "-",
                f"{rate.floor / rate.seconds:.0%}",
                "-" if rate.what.startswith("ours") else f"{ours.images / ours.seconds / a_second:.2f} x",
            )
        return table


def frames_of(encoder: VisionEncoder, lengths: Sequence[int]) -> list[Frame]:
    draw, pixels = np.random.default_rng(0), encoder.vision_config.patch_pixels
    return [Frame(draw.integers(0, 256, (n, pixels), dtype=np.uint8), (2, n // 2)) for n in lengths]


def device_seconds(encoder: VisionEncoder, lengths: Sequence[int], group: int) -> float:
    """Of one call, its inputs on the device."""
    plan = plan_call(lengths, 1, Bucket(sum(lengths)))
    ready, arguments = encoder._arguments(plan, frames_of(encoder, lengths), [None] * len(lengths))
    return median_seconds(lambda: encoder._run(ready, arguments), [()], group)


def median_rounds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The first, which compiles, is left out."""
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def torch_seconds(work: Callable[[], object], group: int) -> float:
    import torch

    seconds = []
    with torch.inference_mode():
        for _ in range(2):
            work()
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(group):
                work()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - begin) / group)
    return statistics.median(seconds)


def on_a_gpu() -> bool:
    return default_platform().runs_kernels
