"""The vision tower of Qwen2.5-VL.

    x = patches W                                        (no bias, no position table)
    merged cells reordered window by window
    each block:  x += attention(RMS(x));  x += SwiGLU(RMS(x))
    row = merger(x), one row for 2x2 patches, put back in the image's own order

A patch sees its window, and its whole image in the blocks of fullatt_block_indexes. Source: Qwen2.5-VL as released in
transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from vitbatch.attention import attend, attend_windows
from vitbatch.config import VisionConfig, read_count, read_geometry, read_indexes
from vitbatch.lanes import LaneInputs
from vitbatch.towers.layers import FusedAttention, Linear, PatchEmbed, RmsBlock, SwiGLU, axial_rotary
from vitbatch.towers.registry import Family, register
from vitstripe import nn
from vitstripe.platform import Platform

# Fixed in the reference, whatever the config says.
_EPS = 1e-6


@dataclass(frozen=True)
class Qwen25VLVisionConfig(VisionConfig):
    """window_size: side of an attention window in pixels. full_attention_indexes: blocks without windows."""

    window_size: int
    full_attention_indexes: tuple[int, ...]

    def __post_init__(self):
        super().__post_init__()
        if not self.window_cells:
            cell = self.merge_size * self.patch_size
            raise ValueError(f"vision_config: window_size {self.window_size} is under one token of {cell} pixels")
        if any(not 0 <= i < self.depth for i in self.full_attention_indexes):
            raise ValueError(
                f"vision_config: fullatt_block_indexes {list(self.full_attention_indexes)} must lie in "
                f"[0, {self.depth})"
            )

    @property
    def window_cells(self) -> int:
        return self.window_size // self.merge_size // self.patch_size


def read_config(hf_config: Mapping[str, Any]) -> Qwen25VLVisionConfig:
    """From a parsed config.json. Raises ValueError that names what is absent or unsupported."""
    fields = read_geometry(hf_config, activation="silu")
    vision = hf_config["vision_config"]
    return Qwen25VLVisionConfig(
        **fields,
        window_size=read_count(vision, "window_size"),
        full_attention_indexes=read_indexes(vision, "fullatt_block_indexes"),
    )


class Merger(nnx.Module):
    """One row from each merge block. `mlp` is a list whose second place has no parameters: the exact GELU."""

    def __init__(self, config: Qwen25VLVisionConfig, dtype):
        self.joined = config.hidden_size * config.patches_per_token
        self.ln_q = nn.RMSNorm(config.hidden_size, eps=_EPS)
        first = Linear(self.joined, self.joined, dtype=dtype, bias=True)
        last = Linear(self.joined, config.out_hidden_size, dtype=dtype, bias=True)
        self.mlp = nnx.List([first, nnx.Module(), last])

    def __call__(self, x: Float[Array, "C H"]) -> Float[Array, "T O"]:
        first, _, last = self.mlp
        h = jax.nn.gelu(first(self.ln_q(x).reshape(-1, self.joined)).astype(jnp.float32), approximate=False)
        return last(h.astype(x.dtype))


class Qwen25VLVisionTower(nnx.Module):
    """Patches of one lane -> token rows. Parameters are replicated: no layer is cut over the mesh."""

    def __init__(self, config: Qwen25VLVisionConfig, dtype):
        width = config.hidden_size
        self.patch_embed = PatchEmbed(config, dtype=dtype, bias=False)
        self.blocks = nnx.List(
            [
                RmsBlock(
                    width,
                    eps=_EPS,
                    attn=FusedAttention(width, config.num_heads, dtype=dtype),
                    mlp=SwiGLU(width, config.intermediate_size, dtype=dtype, bias=True),
                )
                for _ in range(config.depth)
            ]
        )
        self.merger = Merger(config, dtype)
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, rows: Float[Array, "C F"], lane: LaneInputs[Array], *, platform: Platform
    ) -> Float[Array, "T O"]:
        """As `Qwen3VLVisionTower`; lane.windows must be given."""
        config, windows = self.config, lane.windows
        assert windows is not None, "a tower with window attention needs the lane's windows"
        per_cell = config.patches_per_token
        x = _reorder(self.patch_embed(rows.astype(self.dtype)), windows.order, per_cell)
        positions = _reorder(lane.positions, windows.order, per_cell)
        rotary = axial_rotary(positions, config.head_dim, config.rope_theta, platform=platform)
        in_images = partial(attend, segments=lane.segments, platform=platform)
        in_windows = partial(
            attend_windows,
            segments=lane.segments,
            windows=jnp.repeat(windows.window, per_cell),
            window_patches=per_cell * config.window_cells**2,
            platform=platform,
        )
        whole, windowed = nn.traced_once(rotary, in_images), nn.traced_once(rotary, in_windows)
        for i, block in enumerate(self.blocks):
            x = (whole if i in config.full_attention_indexes else windowed)(block, x)
        return _reorder(self.merger(x), windows.place, 1)


def _reorder(x: Shaped[Array, "N F"], order: Int[Array, "G"], group: int) -> Shaped[Array, "N F"]:
    """x with its groups of `group` rows taken in the given order."""
    grouped = x.reshape(-1, group, x.shape[1])
    return grouped.at[order].get(mode="promise_in_bounds", unique_indices=True).reshape(x.shape)


register(Family(read_config, Qwen25VLVisionTower), "qwen2_5_vl")
