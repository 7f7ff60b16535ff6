"""Encodes images of every size and count after warm-up and reports what was compiled meanwhile: it must be nothing."""

import argparse
import dataclasses
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from scripts.lib.made_up_tower import add_size_options, size_of, write_checkpoint
from vitbatch import EncoderConfig, PreparedImage, VisionEncoder
from vitbatch.compile_guard import CompileGuard
from vitstripe import make_mesh

SIZES = ((112, 112), (512, 512), (1024, 1024), (1080, 1920), (2520, 2464))

Size = tuple[int, int]


def bursts(shrink: int = 1) -> Iterator[list[list[Size]]]:
    """Requests that arrive together, each the (height, width) of its images; none for a request of text alone. shrink:
    divides every side."""
    small, medium, large, screen, largest = sizes = [(h // shrink, w // shrink) for h, w in SIZES]
    for size in sizes:
        yield [[size]]
        yield [[]]
    for count in (1, 2, 3, 5, 8, 13, 21, 34, 55, 64):
        yield [[small] * count]
    for count in range(1, 10):
        yield [[largest]] * count
    draw = np.random.default_rng(0)
    for _ in range(6):
        kinds = (small, medium, large, screen)
        mixed = [[kinds[i] for i in draw.integers(0, 4, draw.integers(0, 4))] for _ in range(draw.integers(2, 7))]
        yield [*mixed, []]
    yield [[medium]] * 64


def images_of(prepare: Callable[[np.ndarray], PreparedImage]) -> Callable[[Size], PreparedImage]:
    """Gives an image of a size that is unlike every one before it: one photograph a size is resized and cut, the others
    are its patches with other bits."""
    made: dict[Size, PreparedImage] = {}
    numbers = iter(range(1, 1 << 30))

    def image(size: Size) -> PreparedImage:
        if size not in made:
            made[size] = prepare(np.random.default_rng(size).integers(0, 256, (*size, 3), dtype=np.uint8))
        number = next(numbers)
        return dataclasses.replace(
            made[size], patches=made[size].patches ^ np.uint8(number % 256), key=number.to_bytes(32, "big")
        )

    return image


@dataclasses.dataclass
class Swept:
    """Requests and images encoded, and the share of the computed patches that was padding."""

    requests: int = 0
    images: int = 0
    calls: int = 0
    padded_ratio: float = 0.0


def sweep(encoder: VisionEncoder, *, shrink: int = 1, on_burst: Callable[[Swept], None] = lambda swept: None) -> Swept:
    """Encodes every burst into the pool, in one call or request by request as the encoder's gate says."""
    swept, image = Swept(), images_of(encoder.processor.prepare)
    useful = computed = 0
    for burst in bursts(shrink):
        requests = [[image(size) for size in sizes] for sizes in burst]
        groups = [[i for images in requests for i in images]] if encoder.batches_requests() else requests
        for group in groups:
            # What a pool cannot hold at once goes in turns, as in a server.
            while group:
                taken, room = [], encoder.cache.capacity
                while group and group[0].num_tokens <= room:
                    room -= group[0].num_tokens
                    taken.append(group.pop(0))
                found = encoder.encode_to_pool(taken)
                encoder.release([i.key for i in taken])
                useful += sum(call.patches for call in found.calls)
                computed += sum(call.lanes * call.bucket for call in found.calls)
                swept.calls += len(found.calls)
        swept.requests += len(requests)
        swept.images += sum(map(len, burst))
        on_burst(swept)
    swept.padded_ratio = 1 - useful / computed
    return swept


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/sweep_sizes",
        description="Warms a vision tower up, then encodes 93 requests and more: 112x112 to 2464x2520, mixed sizes, up "
        "to 9 of the largest at once, 1 to 64 images, text only in between. Exits 1 if anything compiled.",
    )
    parser.add_argument("--model", help="checkpoint folder; otherwise a tower with random weights is made")
    parser.add_argument("--tp", type=int, default=1, help="devices; on a CPU they are made (default 1)")
    parser.add_argument("--batching", default="auto", choices=("auto", "always", "never"))
    parser.add_argument("--no-dp-encoder", action="store_true", help="every device encodes every image")
    parser.add_argument("--cache", help="folder of the persistent compilation cache")
    add_size_options(parser)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("jax", "absl", "orbax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    jax.config.update("jax_num_cpu_devices", args.tp)
    config = EncoderConfig(batching=args.batching, dp_encoder=not args.no_dp_encoder, compilation_cache=args.cache)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_checkpoint(Path(scratch), size_of(args))
        encoder = VisionEncoder.from_checkpoint(folder, mesh=make_mesh(args.tp), config=config)
    guard = CompileGuard()

    def show(done: int, total: int, name: str) -> None:
        print(f"\rwarm-up: {done} of {total} ({name})   ", end="", file=sys.stderr, flush=True)

    print(f"\n{encoder.warm_up(show)}", flush=True)
    guard.mark_ready()
    begin = time.perf_counter()
    swept = sweep(
        encoder,
        on_burst=lambda s: print(f"\r{s.requests} requests, {s.images} images", end="", file=sys.stderr, flush=True),
    )
    print(
        f"\n{swept.requests} requests with {swept.images} images in {swept.calls} calls, "
        f"{time.perf_counter() - begin:.1f} s, {swept.padded_ratio:.1%} padding; "
        f"compiled after ready: {guard.after_ready}"
    )
    guard.close()
    return int(guard.after_ready > 0)


if __name__ == "__main__":
    sys.exit(main())
