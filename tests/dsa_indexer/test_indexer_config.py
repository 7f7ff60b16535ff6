"""What is read from config.json, which layers share a selection, and what is refused."""

import json
from dataclasses import replace

import pytest

from dsa_indexer import IndexerConfig, StripeConfig

GLM = {
    "model_type": "glm_moe_dsa",
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 2048,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
}


def test_the_config_of_the_golden_checkpoint_is_read(goldens):
    config = IndexerConfig.from_hf(json.loads((goldens / "glm_moe_dsa" / "config.json").read_text()))
    assert config == IndexerConfig(
        num_heads=8,
        head_dim=16,
        topk=16,
        rope_dim=8,
        rope_theta=10000.0,
        q_lora_rank=32,
        hidden_size=64,
        layer_types=("full", "full", "shared"),
    )
    assert config.full_layers == (0, 1)
    assert config.source_layers == (0, 1, 1)


def test_rope_theta_is_also_found_at_the_top_level():
    flat = {k: v for k, v in GLM.items() if k != "rope_parameters"} | {"rope_theta": 1e6}
    assert IndexerConfig.from_hf(flat).rope_theta == 1e6


def test_glm_5_2_has_21_full_layers_from_its_frequency_and_offset():
    config = IndexerConfig.from_hf(GLM | {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert config.full_layers == (0, 1, 2, *range(6, 75, 4))
    assert config.layer_types.count("shared") == 57
    assert config.source_layers[:11] == (0, 1, 2, 2, 2, 2, 6, 6, 6, 6, 10)


def test_without_a_frequency_every_layer_is_full():
    assert set(IndexerConfig.from_hf(GLM).layer_types) == {"full"}


def test_the_default_offset_is_two():
    config = IndexerConfig.from_hf(GLM | {"num_hidden_layers": 8, "index_topk_freq": 3})
    assert config.full_layers == (0, 1, 4, 7)


def test_indexer_types_win_over_the_pattern_and_the_pattern_over_the_frequency():
    small = GLM | {"num_hidden_layers": 4, "index_topk_freq": 2, "index_topk_pattern": "FSSF"}
    assert IndexerConfig.from_hf(small).full_layers == (0, 3)
    named = small | {"indexer_types": ["full", "shared", "full", "shared"]}
    assert IndexerConfig.from_hf(named).full_layers == (0, 2)


def test_an_entry_for_a_speculative_layer_is_left_out():
    config = IndexerConfig.from_hf(
        GLM | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "index_topk_pattern": "FSSF"}
    )
    assert config.layer_types == ("full", "shared", "shared")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"index_topk_pattern": "SFFF", "num_hidden_layers": 4}, "starts with 'shared'"),
        ({"index_topk_pattern": "FS", "num_hidden_layers": 4}, "2 entries in index_topk_pattern"),
        ({"index_topk_pattern": "FXSF", "num_hidden_layers": 4}, "X in index_topk_pattern"),
        ({"index_topk_freq": 0}, "index_topk_freq = 0"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_skip_topk_offset = 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"index_topk": None}, "no 'index_topk'"),
        ({"index_topk": 0}, "topk is 0"),
        ({"rope_parameters": {}}, "no 'rope_theta'"),
        ({"model_type": "deepseek_v32"}, "'deepseek_v32'"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
        ({"index_k_norm_type": "rms"}, "'rms'"),
        ({"index_kpool": 4}, "index_kpool = 4"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "'yarn'"),
    ],
)
def test_a_config_that_would_select_other_keys_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        IndexerConfig.from_hf(GLM | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"head_dim": True}, "head_dim is True"),
        ({"rope_dim": 63}, "rope_dim is 63"),
        ({"rope_dim": 130}, "at most head_dim = 128"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"layer_types": ()}, "starts with 'nothing'"),
        ({"layer_types": ("full", "half")}, "half"),
    ],
)
def test_an_indexer_config_is_validated_where_it_is_made(change, says):
    with pytest.raises(ValueError, match=says):
        replace(IndexerConfig.from_hf(GLM), **change)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"rows": True}, "rows is True"),
        ({"merge": "psum"}, "merge is 'psum'; it must be one of pmax, all_gather"),
        ({"min_mean_keys": -1}, "min_mean_keys is -1"),
    ],
)
def test_a_stripe_config_is_validated_where_it_is_made(fields, says):
    with pytest.raises(ValueError, match=says):
        StripeConfig(**fields)
