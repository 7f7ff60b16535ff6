"""Compares a checkpoint's vision tower, as this project computes it, with transformers'."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from make_goldens import visual_tensors
from rich.console import Console
from rich.table import Table

from vitbatch import BucketLadder, EncoderConfig, VisionEncoder
from vitbatch.encoder import Frame
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, CheckpointError

DEFAULT_BOUND = 5e-6


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/check_parity",
        description=(
            "Loads the vision tower of a Hugging Face folder in transformers and here, both in float32 on the CPU, "
            "runs images and a video of several sizes through both, and prints the largest difference of each output "
            "over the output's largest value. The exit status is 1 if one is above the bound, 2 if the folder cannot "
            "be used. The language model is not loaded."
        ),
        epilog="example: scripts/check_parity path/to/Qwen3-VL-8B-Instruct",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="Hugging Face folder")
    parser.add_argument("--bound", type=float, default=DEFAULT_BOUND, help="(default %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="host devices to deal the images over (default 1)")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Comparison:
    """One output of one grid. error: largest difference over the largest value. cosine: the worst token's."""

    grid: str
    output: str
    tokens: int
    error: float
    cosine: float


def compare(path: Path, tp: int) -> Iterator[Comparison]:
    """Raises CheckpointError when PATH is no usable Hugging Face folder."""
    checkpoint = Checkpoint(path)
    if checkpoint.is_orbax:
        raise CheckpointError(f"{path} is an Orbax folder; give the Hugging Face folder it was made from")
    config = EncoderConfig(ladder=BucketLadder((512,)), dtype=jnp.float32)
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(tp), config=config)

    # Only now, so that a folder that does not fit is answered at once.
    from reference_tower import ReferenceTower, frame_grids, inputs_of

    reference = ReferenceTower(path)
    reference.load(visual_tensors(checkpoint))
    for name, (images, rows, _) in inputs_of(encoder.vision_config).items():
        shapes = frame_grids(images)
        starts = np.cumsum([0, *(gh * gw for gh, gw in shapes)])
        frames = [Frame(rows[a : a + gh * gw], (gh, gw)) for a, (gh, gw) in zip(starts, shapes, strict=False)]
        ours = np.concatenate(encoder.encode_frames(frames)).astype(np.float64)
        parts = np.split(ours, 1 + encoder.num_deepstack, axis=1)
        for (output, value), got in zip(reference.run(images, rows).items(), parts, strict=True):
            want = value.astype(np.float64)
            error = np.abs(got - want).max() / np.abs(want).max()
            cosine = (got * want).sum(-1) / (np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1))
            yield Comparison(name, output, len(want), float(error), float(cosine.min()))


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.tp)
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        found = list(compare(options.path, options.tp))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("grid", "output", "tokens", "relative error", "worst cosine", "")
    above = [c for c in found if not c.error <= options.bound]
    for c in found:
        table.add_row(
            c.grid, c.output, str(c.tokens), f"{c.error:.1e}", f"{c.cosine:.8f}", "above" if c in above else ""
        )
    Console().print(table)
    print(f"{len(found) - len(above)} of {len(found)} outputs are within {options.bound:g} of the largest value")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
