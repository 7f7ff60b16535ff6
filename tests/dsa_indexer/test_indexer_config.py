"""What is read from config.json, which layers share a selection, and what is refused."""

import json
from dataclasses import replace

import pytest

from dsa_indexer import ForcedTokens, IndexerConfig, StripeConfig, Yarn

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

DEEPSEEK = {
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
FLASH = {
    "model_type": "glm5_next_text",
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_kpool": 4,
    "qk_rope_head_dim": 0,
    "q_lora_rank": 1536,
    "hidden_size": 4096,
    "num_hidden_layers": 45,
    "layer_types": ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
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


def test_deepseek_rotates_half_against_half_with_yarn_frequencies():
    config = IndexerConfig.from_hf(DEEPSEEK)
    assert (config.rope_interleaved, config.rope_theta) == (False, 10000.0)
    assert config.yarn == Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.full_layers == tuple(range(61))
    assert (config.selected, config.width) == (2048, 2048)


def test_glm_rotates_pairs_and_the_field_of_the_config_decides():
    assert IndexerConfig.from_hf(GLM).rope_interleaved
    assert not IndexerConfig.from_hf(GLM | {"indexer_rope_interleave": False}).rope_interleaved
    assert IndexerConfig.from_hf(DEEPSEEK | {"indexer_rope_interleave": True}).rope_interleaved


def test_glm_5_3_flash_selects_512_pools_and_up_to_2051_tokens_in_11_layers():
    config = IndexerConfig.from_hf({"model_type": "glm5_next", "text_config": FLASH})
    assert (config.pool, config.selected, config.width, config.rope_dim) == (4, 512, 2051, 0)
    assert config.full_layers == tuple(range(3, 44, 4))
    assert config.source_layers[:9] == (None, None, None, 3, None, None, None, 7, None)


def test_linear_layers_are_also_found_in_the_older_spelling():
    old = {name: value for name, value in FLASH.items() if name != "layer_types"}
    old["linear_attn_config"] = {"kda_layers": [i for i in range(45) if i % 4 != 3]}
    assert IndexerConfig.from_hf(old) == IndexerConfig.from_hf(FLASH)


def test_a_selection_is_shared_across_linear_layers():
    types = ["full", "full", "full", "full", "full", "full", "full", "shared"]
    config = IndexerConfig.from_hf(
        FLASH | {"num_hidden_layers": 8, "layer_types": FLASH["layer_types"][:8], "indexer_types": types}
    )
    assert config.layer_types == ("none",) * 3 + ("full",) + ("none",) * 3 + ("shared",)
    assert config.source_layers[7] == 3


def test_the_key_norm_and_forced_tokens_are_read():
    config = IndexerConfig.from_hf(
        GLM
        | {"index_k_norm_type": "rms", "index_k_norm_eps": 1e-5, "index_init_tokens": 16, "index_local_tokens": 1024}
    )
    assert (config.k_norm, config.k_norm_eps, config.forced) == ("rms", 1e-5, ForcedTokens(16, 1024))
    plain = IndexerConfig.from_hf(GLM | {"rms_norm_eps": 1e-5})
    assert (plain.k_norm, plain.k_norm_eps, plain.forced) == ("layer", 1e-6, ForcedTokens())


def test_the_hadamard_rotation_is_the_callers_choice():
    assert not IndexerConfig.from_hf(DEEPSEEK).hadamard
    assert IndexerConfig.from_hf(DEEPSEEK, hadamard=True).hadamard


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
        ({"model_type": "qwen4_exp"}, "'qwen4_exp'"),
        ({"index_k_norm_type": "batch"}, "'batch'"),
        ({"index_kpool": 4}, "index_kpool = 4"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4}}, "YaRN rope without"),
        ({"model_type": "glm5_next"}, "no 'index_kpool'"),
        ({"model_type": "glm5_next", "index_kpool": 3}, "topk is 2048; it must be a multiple of pool = 3"),
        ({"model_type": "glm5_next", "index_kpool": 4, "index_kpool_compress": False}, "index_kpool_compress = False"),
        (
            {"model_type": "glm5_next", "index_kpool": 4, "index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail = False",
        ),
        ({"model_type": "glm5_next", "index_kpool": 4, "index_init_tokens": 1}, "pools are never forced"),
        ({"layer_types": ["linear_attention"] * 78}, "starts with 'nothing'"),
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
        ({"layer_types": ("none", "shared", "full")}, "starts with 'shared'"),
        ({"k_norm": "group"}, "k_norm is 'group'; it must be one of layer, rms"),
        ({"k_norm_eps": 0.0}, r"k_norm_eps is 0\.0"),
        ({"head_dim": 96, "hadamard": True}, "96 dimensions"),
        ({"pool": 0}, "pool is 0"),
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
