"""The server itself, with weights made on the device: everything but the reading of files is what users run."""

import argparse
import sys
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

import serving.load
import vitbatch.encoder
from scripts.lib.made_up_model import SHAPES, random_state, write_folder
from serving.__main__ import main as serve


def _made_up(checkpoint: Any, binding: Any, mesh: Mesh, axis: str = "tp", progress: Any = None) -> nnx.State:
    return random_state(binding.abstract, mesh, axis)


def use_random_weights() -> None:
    """From here on what is loaded from a checkpoint is made on the device instead."""
    for module in (serving.load, vitbatch.encoder):
        module.load, module.raise_problems = _made_up, lambda checkpoint, bindings: None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="All other options are the server's own.")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where to write config.json and tokenizer")
    options, rest = parser.parse_known_args()
    use_random_weights()
    return serve(["--model", str(write_folder(options.folder, options.shape)), *rest])


if __name__ == "__main__":
    sys.exit(main())
