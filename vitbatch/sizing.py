"""How large an encoder's lanes, calls and row pool are where its configuration leaves that open."""

import logging

import jax
import numpy as np

from vitbatch.config import ATTENTION_BLOCK, TINY_BLOCK, BucketLadder, EncoderConfig, VisionConfig, activation_bytes
from vitbatch.images import ImageProcessor
from vitstripe.platform import platform_of

logger = logging.getLogger("vitbatch.encoder")

_MIN_POOL_TOKENS = 1024
_POOL_IMAGES = 4

_CPU_LANE, _GPU_LANE = 2048, 16384

# A cache of keys and values sized from what is free after warm-up commonly takes 80 % of it.
_GPU_MEMORY_SHARE = 0.15


def good_lane(device: jax.Device) -> int:
    """Patches a lane that make full use of a device: a GPU wants many rows a launch, a CPU's caches hold no more."""
    return _CPU_LANE if platform_of(device).kind == "cpu" else _GPU_LANE


def choose_ladder(
    vision: VisionConfig,
    processor: ImageProcessor,
    config: EncoderConfig,
    dtype: np.dtype,
    lanes: int,
    device: jax.Device,
) -> BucketLadder:
    """Room for the largest image and many small ones, within the memory given. Raises ValueError when that holds no
    lane at all."""
    largest, on_cpu = processor.largest_image_patches, platform_of(device).kind == "cpu"
    memory = config.memory_bytes
    if memory is None and not on_cpu and (stats := device.memory_stats()):
        memory = int((stats["bytes_limit"] - stats["bytes_in_use"]) * _GPU_MEMORY_SHARE)
    longest = None
    if memory is not None:
        patch_bytes = activation_bytes(vision, dtype.itemsize, lanes)
        longest = memory // patch_bytes // ATTENTION_BLOCK * ATTENTION_BLOCK
        if not longest:
            raise ValueError(
                f"{memory} bytes hold no lane of {ATTENTION_BLOCK} patches at {patch_bytes} bytes a patch; give "
                f"more memory_bytes"
            )
    ladder = BucketLadder.default(
        largest,
        longest,
        # Two of the largest side by side even out the lanes; a CPU has no use for it.
        least_top=good_lane(device) if on_cpu else max(good_lane(device), 2 * largest),
        # A tiny block must hold whole tokens.
        smallest_image_patches=ATTENTION_BLOCK
        if TINY_BLOCK % vision.patches_per_token
        else processor.smallest_image_patches,
    )
    if ladder.largest < largest:
        logger.warning(
            "memory for %d patches a lane, but an image may have %d; larger images will be refused: give more "
            "memory_bytes or lower max_image_pixels",
            ladder.largest,
            largest,
        )
    return ladder


def pool_tokens(config: EncoderConfig, largest_image_tokens: int, row_bytes: int) -> int:
    """Rows of the pool. Raises ValueError when the bytes given hold none."""
    if config.pool_bytes is None:
        return config.pool_tokens or max(_MIN_POOL_TOKENS, _POOL_IMAGES * largest_image_tokens)
    tokens = config.pool_bytes // row_bytes
    if not tokens:
        raise ValueError(f"pool_bytes {config.pool_bytes} is less than one row of {row_bytes} bytes; raise it")
    return tokens
