"""The vision tower of GLM-4.1V, 4.5V and 4.6V.

    x = RMS(patches W + b) + position table
    each block:  x += attention(RMS(x));  x += SwiGLU(RMS(x))       (no biases; the SwiGLU is as wide as O)
    row = merger(downsample(RMS(x))), one row for 2x2 patches

A video is encoded frame by frame. Source: GLM-4.1V as released in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from vitbatch.attention import attend
from vitbatch.config import VisionConfig, read_count, read_flag, read_geometry, read_positive
from vitbatch.lanes import LaneInputs
from vitbatch.planning import merge_order
from vitbatch.towers.layers import (
    Downsample,
    FusedAttention,
    GatedMerger,
    PatchEmbed,
    PositionTable,
    RmsBlock,
    SwiGLU,
    axial_rotary,
)
from vitbatch.towers.registry import Family, register
from vitstripe import nn
from vitstripe.platform import Platform

# The bicubic kernel's one parameter, as torch's grid_sample has it.
_BICUBIC_A = -0.75


@dataclass(frozen=True)
class Glm4vVisionConfig(VisionConfig):
    """image_size: side in pixels of the image whose grid the learned table has. attention_bias: of qkv.
    intermediate_size is the merger's inner width; the blocks' is out_hidden_size."""

    image_size: int
    rms_norm_eps: float
    attention_bias: bool

    def __post_init__(self):
        super().__post_init__()
        if not self.table_side:
            raise ValueError(f"vision_config: image_size {self.image_size} is under one patch of {self.patch_size} px")

    @property
    def table_side(self) -> int:
        return self.image_size // self.patch_size


def read_config(hf_config: Mapping[str, Any]) -> Glm4vVisionConfig:
    """From a parsed config.json. Raises ValueError that names what is absent or unsupported."""
    fields = read_geometry(hf_config, activation="silu")
    vision = hf_config["vision_config"]
    return Glm4vVisionConfig(
        **fields,
        image_size=read_count(vision, "image_size"),
        rms_norm_eps=read_positive(vision, "rms_norm_eps", 1e-5),
        attention_bias=read_flag(vision, "attention_bias", False),
    )


def position_taps(
    config: VisionConfig, gh: int, gw: int
) -> tuple[Int[np.ndarray, "N taps"], Float[np.ndarray, "N taps"]]:
    """Table rows and float32 weights of each patch of a gh x gw grid, in merge-block order: bicubic between half-pixel
    centres, so patch i of n reads the table at (i + 0.5) * side / n - 0.5, and places beyond its edge repeat it."""
    assert isinstance(config, Glm4vVisionConfig)
    side = config.table_side
    place = merge_order(gh, gw, config.merge_size)
    (y, wy), (x, wx) = (_axis_taps(place[:, axis], n, side) for axis, n in enumerate((gh, gw)))
    index = y[:, :, None] * side + x[:, None, :]
    weight = wy[:, :, None] * wx[:, None, :]
    return index.reshape(len(place), 16), weight.reshape(len(place), 16).astype(np.float32)


def _axis_taps(
    at: Int[np.ndarray, "N"], cells: int, side: int
) -> tuple[Int[np.ndarray, "N 4"], Float[np.ndarray, "N 4"]]:
    """The four table cells around each of `cells` places along an axis and their cubic convolution weights (Keys,
    1981), float64."""
    source = (at.astype(np.float64) + 0.5) * side / cells - 0.5
    below = np.floor(source)
    a, t = _BICUBIC_A, source - below

    def near(d):
        return ((a + 2) * d - (a + 3)) * d**2 + 1

    def far(d):
        return a * (((d - 5) * d + 8) * d - 4)

    weight = np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], -1)
    index = below.astype(np.int32)[:, None] + np.arange(-1, 3, dtype=np.int32)
    return np.clip(index, 0, side - 1), weight


class Embeddings(nnx.Module):
    """Holds `position_embedding`, as the files name it."""

    def __init__(self, config: Glm4vVisionConfig, dtype):
        self.position_embedding = PositionTable(config.table_side**2, config.hidden_size, dtype=dtype)

    def __call__(self, index: Int[Array, "C taps"], weight: Float[Array, "C taps"]) -> Float[Array, "C H"]:
        return self.position_embedding(index, weight)


class Glm4vVisionTower(nnx.Module):
    """Patches of one lane -> token rows. Parameters are replicated: no layer is cut over the mesh."""

    def __init__(self, config: Glm4vVisionConfig, dtype):
        width, out, eps = config.hidden_size, config.out_hidden_size, config.rms_norm_eps
        self.patch_embed = PatchEmbed(config, dtype=dtype)
        self.post_conv_layernorm = nn.RMSNorm(width, eps=eps)
        self.embeddings = Embeddings(config, dtype)
        self.blocks = nnx.List(
            [
                RmsBlock(
                    width,
                    eps=eps,
                    attn=FusedAttention(
                        width, config.num_heads, dtype=dtype, qkv_bias=config.attention_bias, proj_bias=False
                    ),
                    mlp=SwiGLU(width, out, dtype=dtype, bias=False),
                )
                for _ in range(config.depth)
            ]
        )
        self.post_layernorm = nn.RMSNorm(width, eps=eps)
        self.downsample = Downsample(config, dtype=dtype)
        self.merger = GatedMerger(out, config.intermediate_size, dtype=dtype)
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, rows: Float[Array, "C F"], lane: LaneInputs[Array], *, platform: Platform
    ) -> Float[Array, "T O"]:
        """As `Qwen3VLVisionTower`."""
        x = self.post_conv_layernorm(self.patch_embed(rows.astype(self.dtype)))
        x = x + self.embeddings(lane.tap_index, lane.tap_weight).astype(x.dtype)
        rotary = axial_rotary(lane.positions, self.head_dim, self.rope_theta, platform=platform)
        in_images = partial(attend, segments=lane.segments, platform=platform)
        run = nn.traced_once(rotary, in_images)
        for block in self.blocks:
            x = run(block, x)
        return self.merger(self.downsample(self.post_layernorm(x)))


register(Family(read_config, Glm4vVisionTower, position_taps, num_taps=16), "glm4v", "glm4v_moe", "glm46v", "glmga")
