"""The vision tower of GLM-OCR.

    x = patches W + b                                                (no position table)
    each block:  x += attention(RMS(x));  x += SwiGLU(RMS(x))        (queries and keys normed; all with biases)
    row = merger(downsample(RMS(x))), one row for 2x2 patches

A video is encoded frame by frame. Source: GLM-OCR as released in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from vitbatch.attention import attend
from vitbatch.config import VisionConfig, read_flag, read_geometry, read_positive
from vitbatch.lanes import LaneInputs
from vitbatch.towers.layers import (
    Downsample,
    FusedAttention,
    GatedMerger,
    PatchEmbed,
    RmsBlock,
    SwiGLU,
    axial_rotary,
)
from vitbatch.towers.registry import Family, register
from vitstripe import nn
from vitstripe.platform import Platform


@dataclass(frozen=True)
class GlmOcrVisionConfig(VisionConfig):
    """rms_norm_eps: of every RMSNorm but those of queries and keys, which take qk_norm_eps. attention_bias: biases on
    the projections of the blocks, attention and SwiGLU alike. merger_size: the merger's inner width. swiglu_limit:
    clamp of every SwiGLU, None for none."""

    rms_norm_eps: float
    qk_norm_eps: float
    attention_bias: bool
    merger_size: int
    swiglu_limit: float | None = None


def read_config(hf_config: Mapping[str, Any]) -> GlmOcrVisionConfig:
    """From a parsed config.json. Raises ValueError that names what is absent or unsupported."""
    fields = read_geometry(hf_config, activation="silu")
    return GlmOcrVisionConfig(
        **fields,
        **read_norms_and_biases(hf_config["vision_config"]),
        merger_size=fields["out_hidden_size"] * fields["in_channels"],
    )


def read_norms_and_biases(vision: Mapping[str, Any]) -> dict[str, Any]:
    """rms_norm_eps, attention_bias and qk_norm_eps. The last is no field of the released files: without it queries and
    keys take rms_norm_eps, as in transformers."""
    eps = read_positive(vision, "rms_norm_eps", 1e-5)
    return {
        "rms_norm_eps": eps,
        "qk_norm_eps": read_positive(vision, "qk_norm_eps", eps),
        "attention_bias": read_flag(vision, "attention_bias", True),
    }


class GlmOcrVisionTower(nnx.Module):
    """Patches of one lane -> token rows. Parameters are replicated: no layer is cut over the mesh."""

    def __init__(self, config: GlmOcrVisionConfig, dtype):
        width, bias, limit = config.hidden_size, config.attention_bias, config.swiglu_limit
        self.patch_embed = PatchEmbed(config, dtype=dtype)
        self.blocks = nnx.List(
            [
                RmsBlock(
                    width,
                    eps=config.rms_norm_eps,
                    attn=FusedAttention(
                        width,
                        config.num_heads,
                        dtype=dtype,
                        qkv_bias=bias,
                        proj_bias=bias,
                        qk_norm_eps=config.qk_norm_eps,
                    ),
                    mlp=SwiGLU(width, config.intermediate_size, dtype=dtype, bias=bias, limit=limit),
                )
                for _ in range(config.depth)
            ]
        )
        self.post_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.downsample = Downsample(config, dtype=dtype)
        self.merger = GatedMerger(config.out_hidden_size, config.merger_size, dtype=dtype, limit=limit)
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, rows: Float[Array, "C F"], lane: LaneInputs[Array], *, platform: Platform
    ) -> Float[Array, "T O"]:
        """As `Qwen3VLVisionTower`."""
        x = self.patch_embed(rows.astype(self.dtype))
        rotary = axial_rotary(lane.positions, self.head_dim, self.rope_theta, platform=platform)
        in_images = partial(attend, segments=lane.segments, platform=platform)
        run = nn.traced_once(rotary, in_images)
        for block in self.blocks:
            x = run(block, x)
        return self.merger(self.downsample(self.post_layernorm(x)))


register(Family(read_config, GlmOcrVisionTower), "glm_ocr")
