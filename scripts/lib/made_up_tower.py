"""A Qwen3-VL checkpoint of any size with random weights and no language model, for benchmarks."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


@dataclass(frozen=True)
class TowerSize:
    """depth x width blocks with `mlp` hidden units, rows of `out` features for each of 1 + deepstack levels.
    min_pixels, max_pixels: the preprocessor's bounds on a resized image."""

    width: int
    depth: int
    heads: int
    mlp: int
    out: int
    deepstack: int = 0
    patch: int = 16
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216


# Rows of the table of learned positions, as in every released Qwen3-VL.
_POSITIONS = 2304


def _shapes(size: TowerSize) -> dict[str, tuple[int, ...]]:
    width, joined = size.width, 4 * size.width
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 3, 2, size.patch, size.patch),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (_POSITIONS, width),
    }
    for block in (f"blocks.{i}." for i in range(size.depth)):
        shapes |= {f"{block}{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        layers = {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.linear_fc1": (size.mlp, width),
            "mlp.linear_fc2": (width, size.mlp),
        }
        for name, shape in layers.items():
            shapes |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[:1]}
    mergers = {"merger.": width} | {f"deepstack_merger_list.{i}.": joined for i in range(size.deepstack)}
    for merger, normed in mergers.items():
        shapes |= {f"{merger}norm.weight": (normed,), f"{merger}norm.bias": (normed,)}
        for name, shape in (("linear_fc1", (joined, joined)), ("linear_fc2", (size.out, joined))):
            shapes |= {f"{merger}{name}.weight": shape, f"{merger}{name}.bias": shape[:1]}
    return shapes


def write_checkpoint(folder: Path, size: TowerSize) -> Path:
    """A Hugging Face folder: weights of variance 1 / inputs, norms near 1, float32. The same on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    tensors = {}
    for name, shape in _shapes(size).items():
        value = draw.standard_normal(shape, np.float32)
        value *= 0.1 if len(shape) == 1 else float(np.prod(shape[1:])) ** -0.5
        tensors["model.visual." + name] = value + 1 if "norm" in name and name.endswith("weight") else value
    save_file(tensors, folder / "model.safetensors")
    vision = {
        "model_type": "qwen3_vl",
        "depth": size.depth,
        "hidden_size": size.width,
        "num_heads": size.heads,
        "intermediate_size": size.mlp,
        "out_hidden_size": size.out,
        "patch_size": size.patch,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": _POSITIONS,
        "deepstack_visual_indexes": [size.depth * (i + 1) // (size.deepstack + 1) for i in range(size.deepstack)],
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": vision}))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": size.min_pixels, "longest_edge": size.max_pixels},
        "patch_size": size.patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Options that `size_of` reads. The defaults are a tower of width 384."""
    tower = parser.add_argument_group("made-up tower", "random weights, Qwen3-VL's architecture")
    tower.add_argument("--width", type=int, default=384)
    tower.add_argument("--depth", type=int, default=12)
    tower.add_argument("--heads", type=int, help="default: width / 64, or 16 for a width of 1152")
    tower.add_argument("--mlp", type=int, help="default: 4 x width, or 4304 for a width of 1152")
    tower.add_argument("--out", type=int, default=1024, help="width of the language model (default 1024)")
    tower.add_argument("--deepstack", type=int, default=0, help="deepstack levels (default 0)")
    tower.add_argument("--min-pixels", type=int, default=65_536)
    tower.add_argument("--max-pixels", type=int, default=16_777_216)


def size_of(args: argparse.Namespace) -> TowerSize:
    """The size the options ask for. Width 1152 is Qwen3-VL's own tower: 16 heads, 4304 hidden units."""
    heads, mlp = (16, 4304) if args.width == 1152 else (max(1, args.width // 64), 4 * args.width)
    return TowerSize(
        width=args.width,
        depth=args.depth,
        heads=args.heads or heads,
        mlp=args.mlp or mlp,
        out=args.out,
        deepstack=args.deepstack,
        min_pixels=args.min_pixels,
        max_pixels=args.max_pixels,
    )
