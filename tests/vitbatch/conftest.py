"""Encoders over the tiny Qwen3-VL checkpoint, made once a session for each configuration."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from vitbatch import BucketLadder, EncoderConfig, VisionEncoder
from vitstripe import make_mesh


@pytest.fixture(scope="module", autouse=True)
def _as_users_run_it(fully_optimised: None) -> None:
    """Encoders are shared by these files, and have the same bits for an image in any company."""


@pytest.fixture(scope="session")
def checkpoint(goldens: Path) -> Path:
    return goldens / "qwen3_vl"


@pytest.fixture(scope="session")
def encoder_of(checkpoint: Path) -> Callable[..., VisionEncoder]:
    """encoder_of(tp, capacities, **config): shared, so a test must release what it pins and count by differences."""

    @cache
    def build(tp: int, capacities: tuple[int, ...], **config) -> VisionEncoder:
        made = EncoderConfig(ladder=BucketLadder(capacities), **config)
        return VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(tp), config=made)

    return build
