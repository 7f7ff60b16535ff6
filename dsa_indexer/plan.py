"""What striping is worth: pairs, bytes, balance, break-even and time, from a configuration and a few rates. Host only.

Arithmetic (exact for the model as stated): pairs, bytes, balance. Assumed: the rates. Nothing here is fitted to an
end-to-end measurement.

    replicated   pairs * (2 H D / score_flops + 4 / select_bytes)                        seconds a layer, every device
    striped      the busiest device's pairs in place of all, plus the merge
    merge        4 K bytes a row, (tp - 1) / tp of them over a device's links; twice that for an all-reduce
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsa_indexer.config import StripeConfig
from dsa_indexer.sharing import FULL, layer_types_of
from dsa_indexer.stripes import pairs_per_device

_SCORE_BYTES, _INDEX_BYTES = 4, 4  # float32 scores, int32 indices
_PASSES = {"pmax": 2, "all_gather": 1}  # an all-reduce is a reduce-scatter and an all-gather


@dataclass(frozen=True)
class Rates:
    """What one device does a second. Assumptions, all of them.

    score_flops: scoring, in FLOP/s of the 2 H D of each pair.
    select_bytes: selection, in bytes/s of float32 scores, each counted once.
    link_bytes: one device's links to one peer, bytes/s in one direction; a device has one to every other.
    dense_flops: the model's matrix products during prefill, FLOP/s reached.
    """

    score_flops: float
    select_bytes: float
    link_bytes: float
    dense_flops: float

    def __post_init__(self):
        for name in ("score_flops", "select_bytes", "link_bytes", "dense_flops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Rates.{name} is {getattr(self, name)!r}; it must be positive")


MI355X = Rates(score_flops=1.36e15, select_bytes=3.0e12, link_bytes=76.8e9, dense_flops=2e15)
"""AMD MI355X. score_flops and select_bytes: published timings of fused kernels at 8192 rows x 131072 keys, 6.49 ms to
score with 32 heads of 128 and 1.43 ms to select 2048. link_bytes: the peak of one xGMI link. dense_flops: 40 % of the
fp8 peak, a guess, used only for the floor of the time to the first token."""


@dataclass(frozen=True)
class Work:
    """What a plan needs to know of a model.

    heads H, dim D, topk K: of the indexer. indexer_layers: the layers that own one. q_rank: the width the index
    queries are projected from. active_params: parameters a token passes, embedding not counted. attention_flops: FLOP
    of the attention over the selected keys, a token with K of them, all layers.
    """

    heads: int
    dim: int
    topk: int
    indexer_layers: int
    q_rank: int
    active_params: int
    attention_flops: int

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "Work":
        """From the text part of a config.json of a model with latent attention, an indexer and a mixture of experts.

        Raises ValueError naming a missing field, and for pooled keys, which this arithmetic does not describe.
        """
        if (config.get("index_kpool") or 1) > 1:
            raise ValueError(f"config.json has index_kpool = {config['index_kpool']}; a plan knows a key a token only")

        def need(name: str) -> int:
            value = config.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"config.json has {name} = {value!r}; a plan needs a positive integer")
            return value

        hidden, layers, heads = need("hidden_size"), need("num_hidden_layers"), need("num_attention_heads")
        q_rank, kv_rank = need("q_lora_rank"), need("kv_lora_rank")
        # The rotary part may be empty (glm5_next rotates nothing).
        rope, nope, value = config.get("qk_rope_head_dim") or 0, need("qk_nope_head_dim"), need("v_head_dim")
        attention = hidden * (q_rank + kv_rank + rope) + q_rank * heads * (nope + rope)
        attention += kv_rank * heads * (nope + value) + heads * value * hidden
        dense = min(config.get("first_k_dense_replace", 3), layers)
        experts = need("num_experts_per_tok") + (config.get("n_shared_experts") or 0)
        mlp = (
            3
            * hidden
            * (dense * need("intermediate_size") + (layers - dense) * experts * need("moe_intermediate_size"))
        )
        return Work(
            heads=need("index_n_heads"),
            dim=need("index_head_dim"),
            topk=need("index_topk"),
            indexer_layers=layer_types_of(config).count(FULL),
            q_rank=q_rank,
            active_params=layers * attention + mlp + hidden * need("vocab_size"),
            attention_flops=2 * layers * heads * need("index_topk") * (2 * kv_rank + rope),
        )


GLM_5_2: Mapping[str, Any] = {
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 154880,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}
DEEPSEEK_V3_2: Mapping[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
PRESETS = {"glm-5.2": GLM_5_2, "deepseek-v3.2": DEEPSEEK_V3_2}
"""Fields of config.json as published, so far as a plan reads them."""


@dataclass(frozen=True)
class Pass:
    """One pass (chunk) through one indexer layer. Seconds are of the slowest device.

    pairs: of a row and a key it sees. busiest: pairs of the busiest device when striped. balance: busiest over mean.
    merge_bytes: over one device's links. break_even: mean keys a row at which gain is 0, same balance.
    saved_projection: seconds more that cutting the rows before the query projection saves; not part of gain.
    """

    rows: int
    pairs: int
    busiest: int
    balance: float
    merge_bytes: int
    replicated: float
    striped: float
    break_even: float
    saved_projection: float

    @property
    def gain(self) -> float:
        """Seconds a layer. Below 0 striping costs."""
        return self.replicated - self.striped


@dataclass(frozen=True)
class Plan:
    """The passes of the prompts, one layer's seconds each; the totals are over all layers that own an indexer."""

    passes: tuple[Pass, ...]
    layers: int
    prompts: int
    prefill_floor: float

    @property
    def gain_layer(self) -> float:
        """Seconds a layer, all passes."""
        return sum(p.gain for p in self.passes)

    @property
    def gain_prompt(self) -> float:
        """Seconds a prompt, all layers; the passes' gain shared equally by the prompts."""
        return self.gain_layer * self.layers / self.prompts

    @property
    def share(self) -> float:
        """The gain over the floor of the prefill's time, both of all prompts together."""
        return self.gain_layer * self.layers / self.prefill_floor


def chunked(prompts: Sequence[int], prefix: int, chunk: int) -> list[np.ndarray]:
    """Keys that each row of each pass sees. Prompts are packed one after another, `chunk` rows a pass.

    prompts: new tokens of each; each has `prefix` cached tokens before it. Raises ValueError below 1 (prefix: 0).
    """
    if not prompts or min(prompts) < 1 or chunk < 1 or prefix < 0:
        raise ValueError(
            f"prompts are {list(prompts)}, chunk is {chunk}, prefix is {prefix}; prompts and chunk must be at least 1, "
            f"prefix at least 0"
        )
    lengths = np.concatenate([prefix + np.arange(1, n + 1, dtype=np.int64) for n in prompts])
    return [lengths[start : start + chunk] for start in range(0, len(lengths), chunk)]


def plan_pass(lengths: np.ndarray, work: Work, rates: Rates, *, tp: int, stripes: StripeConfig) -> Pass:
    """One pass. lengths: keys each row sees. Raises ValueError for tp below 2."""
    if tp < 2:
        raise ValueError(f"tp is {tp}; striping takes at least 2 devices")
    rows = len(lengths)
    pair_seconds = 2 * work.heads * work.dim / rates.score_flops + _SCORE_BYTES / rates.select_bytes
    shares = pairs_per_device(lengths, stripes.rows, tp)
    pairs, busiest = int(shares.sum()), int(shares.max())
    merge_bytes = rows * work.topk * _INDEX_BYTES * _PASSES[stripes.merge] * (tp - 1) // tp
    merge_seconds = merge_bytes / (rates.link_bytes * (tp - 1))
    share = busiest / pairs
    return Pass(
        rows=rows,
        pairs=pairs,
        busiest=busiest,
        balance=share * tp,
        merge_bytes=merge_bytes,
        replicated=pairs * pair_seconds,
        striped=busiest * pair_seconds + merge_seconds,
        break_even=merge_seconds / rows / (pair_seconds * (1 - share)) if share < 1 else float("inf"),
        saved_projection=2 * rows * work.q_rank * work.heads * work.dim * (1 - 1 / tp) / rates.dense_flops,
    )


def plan(
    prompts: Sequence[int],
    work: Work,
    rates: Rates,
    *,
    tp: int,
    prefix: int = 0,
    chunk: int = 32768,
    stripes: StripeConfig,
) -> Plan:
    """All passes of the prompts. Raises ValueError as `chunked` and `plan_pass` do.

    prefill_floor: seconds that the model's matrix products and attention alone take, spread evenly over the devices:
    less than any real time to the first token.
    """
    batches = chunked(prompts, prefix, chunk)
    passes = tuple(plan_pass(lengths, work, rates, tp=tp, stripes=stripes) for lengths in batches)
    token_flops = 2 * work.active_params + work.attention_flops
    indexing = work.indexer_layers * sum(p.replicated for p in passes)
    floor = sum(len(lengths) for lengths in batches) * token_flops / (tp * rates.dense_flops) + indexing
    return Plan(passes, work.indexer_layers, len(prompts), floor)
