"""What the families of grouped-query attention read of a config.json, as released and as transformers writes it now."""

import json
from pathlib import Path

import pytest

from serving.models import families, family_of, glm4v, glm_ocr, qwen2_5_vl, qwen3_vl
from serving.models.gqa import GqaConfig
from vitstripe.checkpoint import CheckpointError

QWEN2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
GLM_4_1V_9B = {
    "model_type": "glm4v",
    "text_config": {
        "model_type": "glm4v_text",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
        "vocab_size": 151552,
    },
}


def config_at(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def text(config: dict, **fields) -> dict:
    return config | {"text_config": config["text_config"] | fields}


def test_text_fields_at_the_top_are_those_of_a_text_config():
    nested = {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "text_config": {
            **{k: v for k, v in QWEN2_5_VL_7B.items() if k not in ("model_type", "rope_scaling", "rope_theta")},
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
        },
    }
    flat = qwen2_5_vl.read_config(QWEN2_5_VL_7B)
    assert flat == qwen2_5_vl.read_config(nested)
    assert (flat.attention.head_dim, flat.rotary_dim, flat.rope_theta) == (128, 128, 1e6)
    assert (flat.attention.bias, flat.attention.pairs, flat.contiguous, flat.four_norms) == (True, False, True, False)


def test_half_of_a_head_turns_in_glm_4_1v():
    c = glm4v.read_config(GLM_4_1V_9B)
    assert (c.attention.head_dim, c.rotary_dim, c.mrope_section) == (128, 64, (8, 12, 12))
    assert (c.attention.bias, c.attention.pairs, c.contiguous, c.four_norms) == (True, True, True, True)
    assert (c.moe, c.sparse_mlp) == (None, ())


def test_the_text_part_decides_what_a_glm46v_is(goldens):
    dense = config_at(goldens / "glm46v")
    assert glm4v.read_config(dense).four_norms
    mixture = config_at(goldens / "text_variants" / "glm4v_moe") | {"model_type": "glm46v"}
    c = glm4v.read_config(mixture)
    assert (c.four_norms, c.attention.pairs, c.sparse_mlp) == (False, False, (False, True))
    assert (c.moe.scale, c.moe.limit, c.moe.experts) == (1.0, None, 6)
    with pytest.raises(CheckpointError, match="model_type 'glm9_text'; known here: glm4v_text"):
        glm4v.read_config(text(dense, model_type="glm9_text"))


@pytest.mark.parametrize(
    ("read", "config", "message"),
    [
        (qwen2_5_vl.read_config, QWEN2_5_VL_7B | {"use_sliding_window": True}, "use_sliding_window=True"),
        (qwen2_5_vl.read_config, QWEN2_5_VL_7B | {"layer_types": ["sliding_attention"]}, "sliding_attention"),
        (qwen2_5_vl.read_config, QWEN2_5_VL_7B | {"num_key_value_heads": 5}, "28 query heads are no multiple of 5"),
        (qwen2_5_vl.read_config, QWEN2_5_VL_7B | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (qwen2_5_vl.read_config, QWEN2_5_VL_7B | {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn'"),
        (
            glm4v.read_config,
            text(GLM_4_1V_9B, partial_rotary_factor=0.25),
            r"mrope_section \[8, 12, 12\] must be three numbers that sum to 16, half of the 32 columns",
        ),
        (glm4v.read_config, text(GLM_4_1V_9B, partial_rotary_factor=1.5), "1.5 rotates 192 of 128 columns"),
        (glm_ocr.read_config, text(GLM_4_1V_9B, attention_bias=True), "attention_bias=True"),
        (qwen3_vl.read_config, text(GLM_4_1V_9B, attention_bias=True), "attention_bias=True"),
    ],
)
def test_what_is_not_built_is_refused_by_name(read, config, message):
    with pytest.raises(CheckpointError, match=message):
        read(config)


def test_layers_of_a_qwen3_vl_mixture_may_be_dense(goldens):
    config = config_at(goldens / "text_variants" / "qwen3_vl_moe")
    assert qwen3_vl.read_config(config).sparse_mlp == (False, True)
    every_other = text(config, mlp_only_layers=[], decoder_sparse_step=2, num_hidden_layers=5)
    assert qwen3_vl.read_config(every_other).sparse_mlp == (False, True, False, True, False)
    with pytest.raises(CheckpointError, match="mlp_only_layers"):
        qwen3_vl.read_config(text(config, mlp_only_layers=["first"]))


def test_every_family_is_found_and_an_unknown_one_is_told_them_all():
    with pytest.raises(CheckpointError) as caught:
        family_of({"model_type": "clip"})
    assert all(name in str(caught.value) for name in families())


def test_the_dense_width_of_a_model_with_experts_in_every_layer_cuts_nothing(goldens):
    config = config_at(goldens / "text_variants" / "qwen3_vl_moe")
    odd = text(config, mlp_only_layers=[], intermediate_size=41)
    assert isinstance(qwen3_vl.read_config(odd), GqaConfig)
    shards = family_of(odd).build(odd, 2, "float32").shards
    assert (shards.experts, shards.mlp) == (True, True)
