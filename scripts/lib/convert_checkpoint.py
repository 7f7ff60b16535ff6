"""Writes a Hugging Face checkpoint folder as an Orbax folder, which loads straight into any number of devices.

Needs the project's packages; `scripts/convert_checkpoint` brings them, or run this file in an environment of your own.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from serving.models import bind_decoder
from vitbatch.checkpoint import bind_tower
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, CheckpointError, load, raise_problems, save_orbax

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/convert_checkpoint",
        description=(
            "Reads a Hugging Face folder (config.json and safetensors), checks every tensor against the config, and "
            "writes DST: the same small files, and the weights under orbax/. The server takes either folder. Runs on "
            "the CPU."
        ),
        epilog="example: scripts/convert_checkpoint serving/assets/digits_vlm converted_digits",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="Hugging Face folder")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to make; must be empty or absent")
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="of the matrices in DST (default: the config's dtype); norms stay float32. Loading casts to what it needs",
    )
    return parser.parse_args(arguments)


def config_dtype(config: dict) -> str:
    """The dtype a config.json states for its weights, at the top or in its text part."""
    inner = config.get("text_config", {})
    stated = next((c[key] for c in (config, inner) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    if stated not in DTYPES:
        raise CheckpointError(
            f"config.json states dtype {stated!r}, not one of {sorted(DTYPES)}; choose one with --dtype"
        )
    return stated


def convert(source: Path, target: Path, dtype: str | None) -> None:
    """Raises CheckpointError when SRC is no usable Hugging Face folder or DST is not empty."""
    checkpoint = Checkpoint(source)
    if checkpoint.is_orbax:
        raise CheckpointError(f"{source} is an Orbax folder already")
    chosen = DTYPES[dtype or config_dtype(checkpoint.config)]
    bindings = [bind_decoder(checkpoint, tp=1, dtype=chosen)]
    if "vision_config" in checkpoint.config:
        bindings.append(bind_tower(checkpoint, dtype=chosen))
    raise_problems(checkpoint, bindings)

    mesh, states = make_mesh(1), {}
    for binding in bindings:
        print(f"reading {binding.name}", flush=True)
        states[binding.name] = load(checkpoint, binding, mesh)
    print(f"writing {target}", flush=True)
    save_orbax(target, checkpoint, states)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    jax.config.update("jax_platforms", "cpu")
    try:
        convert(options.source, options.target, options.dtype)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"done: {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
