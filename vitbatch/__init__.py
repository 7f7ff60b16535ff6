"""Encodes the images of many requests in one call: Flax vision towers, bucketed, data-parallel over a mesh."""

from vitbatch.cache import EmbeddingCache, PoolFull
from vitbatch.calls import CallStats, EncodedImages, Frame
from vitbatch.compile_guard import CompileGuard, ProgramMismatch
from vitbatch.config import Bucket, BucketLadder, EncoderConfig, VisionConfig
from vitbatch.encoder import VisionEncoder
from vitbatch.gate import BatchDecision, batches_across_requests, decide_batching
from vitbatch.images import ImageError, ImageProcessor, PreparedImage
from vitbatch.warmup import WarmupReport
from vitbatch.workers import Workers

__all__ = [
    "BatchDecision",
    "Bucket",
    "BucketLadder",
    "CallStats",
    "CompileGuard",
    "EmbeddingCache",
    "EncodedImages",
    "EncoderConfig",
    "Frame",
    "ImageError",
    "ImageProcessor",
    "PoolFull",
    "PreparedImage",
    "ProgramMismatch",
    "VisionConfig",
    "VisionEncoder",
    "WarmupReport",
    "Workers",
    "batches_across_requests",
    "decide_batching",
]
