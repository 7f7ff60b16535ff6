"""Every spelling of a GLM-5-Next config.json, and what is refused."""

import json

import pytest

from serving.models.glm5_next import Glm5NextConfig
from tests.helpers import GOLDENS
from tests.serving.glm5_next_reference import TINY
from vitstripe.checkpoint import CheckpointError


@pytest.fixture
def golden():
    return json.loads((GOLDENS / "glm5_next" / "config.json").read_text())


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_text_fields_may_stand_at_the_top(golden):
    nested = Glm5NextConfig.from_hf(golden)
    flat = Glm5NextConfig.from_hf({**golden["text_config"], "model_type": "glm5_next"})
    assert flat == nested
    assert nested.linear == (True, False)
    assert nested.sparse_mlp == (False, True)
    assert (nested.indexer.pool, nested.indexer.selected, nested.indexer.width) == (4, 4, 19)
    assert nested.latent.norm_eps == nested.kda.norm_eps == nested.hyper.norm_eps == 1e-5
    assert (nested.kda.lower_bound, nested.limit, nested.moe.limit) == (-5.0, 10.0, 10.0)


def test_the_older_spelling_of_linear_attention_says_the_same():
    new = Glm5NextConfig.from_hf(TINY)
    old = without(TINY, "layer_types", *(name for name in TINY if name.startswith("linear_")))
    old["linear_attn_config"] = {
        "kda_layers": [0, 2],
        "full_attn_layers": [1, 3],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    }
    assert Glm5NextConfig.from_hf(old) == new


def test_full_attention_is_an_older_word_for_indexed():
    old = {**TINY, "layer_types": ["linear_attention", "full_attention"] * 2}
    assert Glm5NextConfig.from_hf(old) == Glm5NextConfig.from_hf(TINY)


def test_without_layer_types_every_fourth_layer_is_sparse_and_three_mlps_are_dense():
    c = Glm5NextConfig.from_hf(
        {**without(TINY, "layer_types", "indexer_types", "mlp_layer_types"), "num_hidden_layers": 9}
    )
    assert [i for i in range(9) if not c.linear[i]] == [3, 7] == list(c.indexer.full_layers)
    assert c.sparse_mlp == (False,) * 3 + (True,) * 6
    assert Glm5NextConfig.from_hf({**TINY, "mlp_layer_types": None, "first_k_dense_replace": 1}).sparse_mlp[1]


def test_layers_past_the_last_one_may_be_named():
    named = {**TINY, "layer_types": [*TINY["layer_types"], "full_attention"], "num_nextn_predict_layers": 1}
    named["mlp_layer_types"] = [*TINY["mlp_layer_types"], "sparse"]
    assert Glm5NextConfig.from_hf(named) == Glm5NextConfig.from_hf(TINY)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"linear_lower_bound": -3}, -3.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_attn_config": {"gate_lower_bound": -4.0}}, -4.0),
        ({"linear_attn_config": {"gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, None),
    ],
)
def test_the_lower_bound_of_the_gate(fields, bound):
    assert Glm5NextConfig.from_hf({**TINY, **fields}).kda.lower_bound == bound


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim=64 is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types must name one of"),
        ({"layer_types": ["linear_attention"] * 3}, "for each of 4 layers"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must name"),
        ({"index_kpool": 7}, "topk is 24; it must be a multiple of pool = 7"),
        ({"index_kpool": None}, "index_kpool"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"linear_lower_bound": 2.0}, "lower bound of the gate is 2.0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be at least 2"),
        ({"indexer_types": ["full", "shared", "full", "full"]}, "no earlier selection to share"),
        ({"hc_mult": 0}, "hc_mult is 0"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ({"n_group": 3}, "n_group = 3"),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields, text):
    with pytest.raises(CheckpointError, match=text):
        Glm5NextConfig.from_hf({**TINY, **fields})
