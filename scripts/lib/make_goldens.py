"""Writes a small folder that holds a vision tower and what transformers computes with it."""

import argparse
import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from vitbatch.towers import family_of
from vitstripe.checkpoint import Checkpoint


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/make_goldens",
        description=(
            "Writes OUT: config.json, the vision tower's tensors (model.safetensors), what transformers computes with "
            "them in float32 on the CPU (golden_vision.safetensors), and meta.json, which says how its inputs are "
            "made. From a checkpoint folder it takes the tower as it is; from a config.json, or a folder without "
            "weights, it draws a random one. A preprocessor_config.json beside the config comes along."
        ),
        epilog=(
            "example: scripts/make_goldens my_goldens --config path/to/config.json --seed 3. "
            "The tower alone is made, whatever the size of the language model."
        ),
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make; must be empty or absent")
    parser.add_argument("--config", metavar="PATH", type=Path, required=True, help="config.json or checkpoint folder")
    parser.add_argument("--seed", type=int, default=0, help="of a random tower's parameters (default 0)")
    return parser.parse_args(arguments)


def visual_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The tower's tensors by their names below `visual.`, in the file's dtype."""
    names = [name for name in checkpoint.tensors if "visual." in name]
    return {name.partition("visual.")[2]: checkpoint.read(name) for name in names}


def make_goldens(out: Path, source: Path, seed: int) -> None:
    """Raises ValueError when PATH is unusable or OUT is not empty."""
    folder = source if source.is_dir() else source.parent
    config_file = folder / "config.json" if source.is_dir() else source
    if not config_file.is_file():
        raise ValueError(f"{config_file} does not exist; give a config.json or a folder that holds one")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} exists and is not empty; choose a new folder")
    hf_config = json.loads(config_file.read_text(encoding="utf-8"))
    vision = family_of(hf_config.get("model_type", "")).read_config(hf_config)
    has_weights = source.is_dir() and any(folder.glob("model.safetensors*"))

    # Only now, so that a wrong argument is answered at once.
    from reference_tower import ReferenceTower, inputs_of, versions

    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(config_file, out / "config.json")
    processor = folder / "preprocessor_config.json"
    if processor.is_file():
        shutil.copy(processor, out)
    else:
        print("note: no preprocessor_config.json beside it, so OUT can be compared but images cannot be prepared")
    reference = ReferenceTower(out)
    if has_weights:
        tensors = visual_tensors(Checkpoint(folder))
        reference.load(tensors)
    else:
        tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in reference.draw(seed).items()}
    save_file({f"model.visual.{name}": x for name, x in tensors.items()}, out / "model.safetensors")

    goldens, stated = {}, {}
    for name, (images, rows, input_seed) in inputs_of(vision).items():
        print(f"{name}: {len(rows)} patches", flush=True)
        goldens[f"{name}.grid_thw"] = np.array(images, np.int32)
        goldens |= {f"{name}.{output}": value for output, value in reference.run(images, rows).items()}
        stated[name] = {"input_seed": input_seed, "input_shape": list(rows.shape)}
    save_file(goldens, out / "golden_vision.safetensors")
    origin = {"weights": "of the checkpoint"} if has_weights else {"weights": "random", "seed": seed}
    meta = {"family": reference.model_type, **versions(), **origin, "vision": stated}
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        make_goldens(options.out, options.config, options.seed)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"done: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
