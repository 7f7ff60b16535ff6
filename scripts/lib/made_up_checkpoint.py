"""Writes a small checkpoint with random weights as a folder that every command takes in the place of a real one."""

import argparse
import zlib
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from scripts.lib.made_up_model import SHAPES, write_folder
from serving.models import family_of
from vitbatch.checkpoint import vision_config
from vitbatch.towers import family_of as tower_of
from vitstripe.checkpoint import Checkpoint

LARGEST = 50_000_000


def tensors_of(build: Callable[[], nnx.Module], name_of: Callable[[str], str]) -> dict[str, np.ndarray]:
    """float32 tensors of a module by their names in a file: matrices of variance 1 / inputs, norms near 1, the rest
    near 0. Each follows from its name. Raises ValueError for a model that is too large to be made on the host."""
    _, abstract = nnx.split(nnx.eval_shape(build))
    flat = [(".".join(str(part) for part in path), variable) for path, variable in nnx.to_flat_state(abstract)]
    size = sum(variable.get_value().size for _, variable in flat)
    if size > LARGEST:
        raise ValueError(f"the shape has {size} parameters; only tiny ones, up to {LARGEST}, are written to files")
    made = {}
    for path, variable in flat:
        name, shape = name_of(path), tuple(variable.get_metadata("disk_shape"))
        names = [name]
        if variable.get_metadata("stacked"):
            names, shape = [name.replace("experts.", f"experts.{e}.", 1) for e in range(shape[0])], shape[1:]
        for tensor in names:
            values = np.random.default_rng(zlib.crc32(tensor.encode())).normal(size=shape)
            inputs = np.prod(shape[1:])
            mean, spread = (0.0, inputs**-0.5) if len(shape) > 1 else (float(tensor.endswith("weight")), 0.1)
            made[tensor] = (mean + spread * values).astype(np.float32)
    return made


def write_checkpoint(folder: Path, shape: str) -> Path:
    """The folder, with config.json, tokenizer, template, image settings and weights of a shape of made_up_model."""
    checkpoint = Checkpoint(write_folder(folder, shape))
    config = checkpoint.config
    decoder = family_of(config)
    tensors = tensors_of(lambda: decoder.build(config, 1, jnp.float32), lambda path: decoder.disk_names(path)[0])
    if "vision_config" in config:
        vision = vision_config(checkpoint)
        build = tower_of(vision.model_type).build
        tensors |= tensors_of(lambda: build(vision, jnp.float32), lambda path: f"model.visual.{path}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.lib.made_up_checkpoint", description=__doc__)
    shapes = "tiny: Qwen3-VL; tiny-glm: GLM-5.2; tiny-glm5: GLM-5.3-Flash; tiny-qwen35: Qwen3.5"
    parser.add_argument("shape", choices=sorted(s for s in SHAPES if s.startswith("tiny")), help=shapes)
    parser.add_argument("folder", type=Path, help="made if it is not there")
    options = parser.parse_args()
    print(write_checkpoint(options.folder, options.shape))


if __name__ == "__main__":
    main()
