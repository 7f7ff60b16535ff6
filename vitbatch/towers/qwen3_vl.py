"""The vision tower of Qwen3-VL, before a dense or a mixture-of-experts language model.

    x = patches W + b + position table
    each block:  x += attention(LN(x));  x += MLP(LN(x));  after some blocks a deepstack merger reads x
    row = [merger(x), deepstack merger 0, ..., deepstack merger K-1], one row for 2x2 patches

The GELU is tanh-approximated in the blocks and exact in the mergers. Source: Qwen3-VL as released in transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from vitbatch.attention import attend
from vitbatch.config import VisionConfig, read_count, read_geometry, read_indexes
from vitbatch.lanes import LaneInputs
from vitbatch.planning import merge_order
from vitbatch.towers.layers import (
    Attend,
    FusedAttention,
    GeluMLP,
    Linear,
    PatchEmbed,
    PositionTable,
    Rotary,
    axial_rotary,
)
from vitbatch.towers.registry import Family, register
from vitstripe import nn
from vitstripe.platform import Platform

_EPS = 1e-6


@dataclass(frozen=True)
class Qwen3VLVisionConfig(VisionConfig):
    """num_position_embeddings: rows of the learned table, a square number."""

    num_position_embeddings: int

    def __post_init__(self):
        super().__post_init__()
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"vision_config: num_position_embeddings {self.num_position_embeddings} is no square")

    @property
    def table_side(self) -> int:
        return math.isqrt(self.num_position_embeddings)


def read_config(hf_config: Mapping[str, Any]) -> Qwen3VLVisionConfig:
    """From a parsed config.json. Raises ValueError that names what is absent or unsupported."""
    fields = read_geometry(hf_config, activation="gelu_pytorch_tanh")
    vision = hf_config["vision_config"]
    fields["deepstack_indexes"] = read_indexes(vision, "deepstack_visual_indexes")
    return Qwen3VLVisionConfig(**fields, num_position_embeddings=read_count(vision, "num_position_embeddings"))


def position_taps(
    config: VisionConfig, gh: int, gw: int
) -> tuple[Int[np.ndarray, "N taps"], Float[np.ndarray, "N taps"]]:
    """Table rows and float32 weights of each patch of a gh x gw grid, in merge-block order: bilinear with aligned
    corners, so patch i of n reads the table at i * (side - 1) / (n - 1)."""
    assert isinstance(config, Qwen3VLVisionConfig)
    side = config.table_side
    place = merge_order(gh, gw, config.merge_size).astype(np.float64)
    # A grid of one cell on an axis reads the table's first row there.
    place *= (side - 1) / np.maximum([gh - 1, gw - 1], 1)
    low = np.floor(place).astype(np.int32)
    fraction = place - low
    high = np.minimum(low + 1, side - 1)
    (y0, x0), (y1, x1), (fy, fx) = low.T, high.T, fraction.T
    index = np.stack([y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1], -1)
    weight = np.stack([(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx], -1)
    return index.astype(np.int32), weight.astype(np.float32)


class Block(nnx.Module):
    def __init__(self, config: Qwen3VLVisionConfig, dtype):
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=_EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=_EPS)
        self.attn = FusedAttention(config.hidden_size, config.num_heads, dtype=dtype)
        self.mlp = GeluMLP(config.hidden_size, config.intermediate_size, dtype=dtype, approximate=True)

    def __call__(self, x: Float[Array, "C H"], rotary: Rotary, attend: Attend) -> Float[Array, "C H"]:
        x = x + self.attn(self.norm1(x), rotary, attend)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """One row from each merge block. The main merger norms patches, a deepstack merger norms the joined rows."""

    def __init__(self, config: Qwen3VLVisionConfig, dtype, *, joined_norm: bool):
        joined = config.hidden_size * config.patches_per_token
        self.norm = nn.LayerNorm(joined if joined_norm else config.hidden_size, eps=_EPS)
        self.linear_fc1 = Linear(joined, joined, dtype=dtype, bias=True)
        self.linear_fc2 = Linear(joined, config.out_hidden_size, dtype=dtype, bias=True)
        self.joined, self.joined_norm = joined, joined_norm

    def __call__(self, x: Float[Array, "C H"]) -> Float[Array, "T O"]:
        x = self.norm(x.reshape(-1, self.joined) if self.joined_norm else x).reshape(-1, self.joined)
        h = jax.nn.gelu(self.linear_fc1(x).astype(jnp.float32), approximate=False)
        return self.linear_fc2(h.astype(x.dtype))


class Qwen3VLVisionTower(nnx.Module):
    """Patches of one lane -> token rows. Parameters are replicated: no layer is cut over the mesh."""

    def __init__(self, config: Qwen3VLVisionConfig, dtype):
        self.patch_embed = PatchEmbed(config, dtype=dtype)
        self.pos_embed = PositionTable(config.num_position_embeddings, config.hidden_size, dtype=dtype)
        self.blocks = nnx.List([Block(config, dtype) for _ in range(config.depth)])
        self.merger = PatchMerger(config, dtype, joined_norm=False)
        self.deepstack_merger_list = nnx.List(
            [PatchMerger(config, dtype, joined_norm=True) for _ in config.deepstack_indexes]
        )
        self.deepstack_indexes = config.deepstack_indexes
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, rows: Float[Array, "C F"], lane: LaneInputs[Array], *, platform: Platform
    ) -> Float[Array, "T W"]:
        """rows: normalised pixels, features ordered (channel, frame, y, x), patches in merge-block order.

        Returns [C / 4, O * (1 + K)] in the parameters' dtype. Rows of padding are finite and mean nothing.
        platform: what it is compiled for.
        """
        x = self.patch_embed(rows.astype(self.dtype))
        x = x + self.pos_embed(lane.tap_index, lane.tap_weight).astype(x.dtype)
        rotary = axial_rotary(lane.positions, self.head_dim, self.rope_theta, platform=platform)
        in_images = partial(attend, segments=lane.segments, platform=platform)
        run, deepstack = nn.traced_once(rotary, in_images), []
        for i, block in enumerate(self.blocks):
            x = run(block, x)
            if i in self.deepstack_indexes:
                deepstack.append(self.deepstack_merger_list[self.deepstack_indexes.index(i)](x))
        return jnp.concatenate([self.merger(x), *deepstack], -1)


register(Family(read_config, Qwen3VLVisionTower, position_taps, num_taps=4), "qwen3_vl", "qwen3_vl_moe")
