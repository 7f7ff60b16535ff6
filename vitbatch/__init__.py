"""Encodes the images of many requests in one call: Flax vision towers, bucketed, data-parallel over a mesh."""

from vitbatch.cache import EmbeddingCache, PoolFull
from vitbatch.config import BucketLadder, EncoderConfig, VisionConfig
from vitbatch.encoder import CallStats, EncodedImages, VisionEncoder
from vitbatch.gate import batches_across_requests
from vitbatch.images import ImageError, ImageProcessor, PreparedImage
from vitbatch.warmup import WarmupReport

__all__ = [
    "BucketLadder",
    "CallStats",
    "EmbeddingCache",
    "EncodedImages",
    "EncoderConfig",
    "ImageError",
    "ImageProcessor",
    "PoolFull",
    "PreparedImage",
    "VisionConfig",
    "VisionEncoder",
    "WarmupReport",
    "batches_across_requests",
]
