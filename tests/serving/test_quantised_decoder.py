"""A decoder of a block FP8 checkpoint gives the bits of the same decoder with what its weights stand for."""

import ml_dtypes
import numpy as np
import pytest

from serving.models.decoder import Selection
from tests.serving.text_variants import Variant, weights_of

BLOCK = 16
KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.weight", "e_score", "weights_proj")
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}


def quantised(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The variant's tensors with every projection in float8, and what they stand for in float32."""
    held, plain = {}, {}
    for tensor, values in weights_of(name).items():
        plain[tensor] = held[tensor] = values.astype(np.float32)
        if values.ndim < 2 or any(part in tensor for part in KEPT):
            continue
        rows, columns = values.shape
        grid = np.zeros((-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK), np.float32)
        grid[:rows, :columns] = plain[tensor]
        blocks = grid.reshape(grid.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scales = np.abs(blocks).max((1, 3)) / 448
        spread = scales.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
        held[tensor] = (plain[tensor] / spread).astype(ml_dtypes.float8_e4m3fn)
        held[tensor + "_scale_inv"] = scales
        plain[tensor] = held[tensor].astype(np.float32) * spread
    return held, plain


@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["deepseek_v32_yarn", "glm4v_partial"])
def test_float8_weights_compute_what_they_stand_for(tmp_path, name, tp):
    """Latents of 12, ropes of 16 and heads of 24 columns: cuts lie inside blocks."""
    held, plain = quantised(name)
    assert sum(t.dtype == ml_dtypes.float8_e4m3fn for t in held.values()) > 10
    logits = []
    for folder, tensors, fields in (("fp8", held, CONFIG), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        variant = Variant(name, tmp_path / folder, tensors, **fields)
        logits.append(variant.logits(variant.driver(tp), [31, 64] if "deepseek" in name else [31], Selection(None)))
    np.testing.assert_array_equal(*logits)
