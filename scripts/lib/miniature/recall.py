"""Recall: a small GLM-MoE-DSA decoder that finds what a text said, with few keys selected a row."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from scripts.lib.miniature.recall_data import MOST_QUESTIONS, TASKS, Mix, scored_batch, train_batch
from scripts.lib.miniature.recall_model import Form, forward, hf_config, logits_of
from scripts.lib.miniature.recall_tokenizer import tokenizer_files
from scripts.lib.miniature.spec import Batch, Job, Part, Recipe, Scores, Suite
from serving.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaDecoder

_FORMS = {
    "dense": Form(None),
    "masked": Form("indexer"),
    "gathered": Form("indexer", gathered=True),
    "random": Form("random"),
    "random-gathered": Form("random", gathered=True),
}
_DIVERGENCE, _BALANCE = 0.5, 0.01
_ANSWER_ROWS = 4.0
"""What a row of an answer counts in the indexer's loss, a sampled one 1."""

_EARLY = Mix(repeats=0.1, associations=0.3, pairs=0.42, ruler=0.04, context_weight=0.05)
_SPARSE = Mix(repeats=0.03, associations=0.12, pairs=0.5, ruler=0.05, context_weight=0.05)
_LATE = Mix(repeats=0.0, associations=0.0, pairs=0.55, ruler=0.08, context_weight=0.05)


@dataclass(frozen=True)
class Stage:
    """A part of the training. until: the progress at which it ends. programs: in turn, batch after batch."""

    until: float
    programs: tuple[str, ...]
    mix: Mix


@dataclass(frozen=True)
class Preset:
    """A size of the model with its curriculum. program names: form/tokens/rows.

    held_out: name of a held-out set -> (program, tokens, depth of the needle or None, batches, gated).
    """

    config: Mapping[str, Any]
    stages: tuple[Stage, ...]
    sampled: int
    held_out: Mapping[str, tuple[str, int, float | None, int, bool]]


def _full() -> Preset:
    short, middle, long = "masked/256/128", "gathered/1024/64", "gathered/8192/8"
    scored, random = "gathered/8192/16", "random-gathered/8192/16"
    held_out: dict[str, tuple[str, int, float | None, int, bool]] = {
        "256": ("gathered/1024/96", 256, None, 8, True),
        "512": ("gathered/1024/96", 512, None, 8, True),
        "1024": ("gathered/1024/96", 1024, None, 8, True),
        "2048": (scored, 2048, None, 38, True),
        "4096": (scored, 4096, None, 38, True),
        "8192": (scored, 8192, None, 38, True),
        "256 random": ("random-gathered/1024/96", 256, None, 2, False),
        "1024 random": ("random-gathered/1024/96", 1024, None, 2, False),
        "8192 random": (random, 8192, None, 6, False),
    }
    held_out |= {f"8192 depth {d:g}": (scored, 8192, d, 18, True) for d in (0.0, 0.01, 0.25, 0.5, 0.75, 1.0)}
    return Preset(
        config=hf_config(),
        stages=(
            # Telling one key from others is what takes longest to learn, and short texts ask it most often a second.
            Stage(0.32, ("dense/256/128",), _EARLY),
            Stage(0.42, (short,), _SPARSE),
            Stage(0.56, (middle, middle, short), _LATE),
            Stage(0.70, ("gathered/2048/32", middle), _LATE),
            Stage(1.00, (long, middle, "gathered/2048/32"), _LATE),
        ),
        sampled=128,
        held_out=held_out,
    )


def _tiny() -> Preset:
    """For a CPU: three layers, short texts."""
    config = hf_config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        qk_head_dim=32,
        head_dim=16,
        v_head_dim=16,
        index_head_dim=32,
        index_topk=8,
        indexer_types=["full", "full", "shared"],
        layer_types=["indexed_attention"] * 3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        moe_intermediate_size=32,
        n_routed_experts=4,
    )
    return Preset(
        config=config,
        stages=(
            Stage(0.6, ("dense/64/16",), _EARLY),
            Stage(1.0, ("masked/64/16",), _EARLY),
        ),
        sampled=24,
        held_out={
            "64": ("masked/64/16", 64, None, 8, False),
            "64 random": ("random/64/16", 64, None, 4, False),
        },
    )


PRESETS = {"gpu": _full, "cpu": _tiny, "tiny": _tiny}
RECIPES = {
    "gpu": Recipe(minutes=8.5, peak=3e-3, decay_from=0.35, staged=True, workers=8, eval_seconds=40.0, log_steps=200),
    "cpu": Recipe(minutes=8.0, peak=4e-3, workers=1, eval_seconds=10.0, log_steps=50),
    "tiny": Recipe(steps=20, workers=0, log_steps=10),
}


def _parse(program: str) -> tuple[Form, int, int]:
    form, tokens, rows = program.split("/")
    return _FORMS[form], int(tokens), int(rows)


def _share(right: jax.Array, counted: jax.Array) -> jax.Array:
    """The part of the counted tokens that would be chosen greedily."""
    return (right & counted).sum() / jnp.maximum(counted.sum(), 1)


class Recall:
    """See scripts.lib.miniature.spec.Miniature."""

    name = "recall"
    tasks = TASKS

    def __init__(self, preset: str = "gpu"):
        if preset not in PRESETS:
            raise ValueError(f"preset {preset!r} is none of {', '.join(PRESETS)}")
        self.preset = PRESETS[preset]()
        self._parsed = GlmMoeDsaConfig.from_hf(self.preset.config)
        self.suites = {
            name: Suite(
                title=f"{tokens} tokens"
                + ("" if depth is None else f", needle at {100 * depth:g} %")
                + (", keys selected at random" if "random" in program else ""),
                programs=(program,),
                batches=batches,
                gate=dict.fromkeys(TASKS, 0.98) if gated else {},
            )
            for name, (program, tokens, depth, batches, gated) in self.preset.held_out.items()
        }

    def parts(self, dtype: Any) -> Mapping[str, Part]:
        return {"decoder": Part(lambda: GlmMoeDsaDecoder(self._parsed, dtype=dtype, tp=1), lambda path: path)}

    def files(self) -> Mapping[str, str]:
        longest = self.preset.config["max_position_embeddings"]
        return {"config.json": json.dumps(self.preset.config, indent=2), **tokenizer_files(longest)}

    def _stage(self, progress: float) -> Stage:
        return next((s for s in self.preset.stages if progress < s.until), self.preset.stages[-1])

    def program(self, job: Job) -> str:
        if job.suite is not None:
            return self.preset.held_out[job.suite][0]
        programs = self._stage(job.progress).programs
        return programs[job.index % len(programs)]

    def shapes(self, program: str) -> Mapping[str, jax.ShapeDtypeStruct]:
        _, t, b = _parse(program)
        r = self.preset.sampled
        whole = {"ids": (b, t + 1), "rows": (b, r), "answers": (b, t), "task": (b,)}
        shapes = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in whole.items()}
        return shapes | {"weights": jax.ShapeDtypeStruct((b, t), jnp.float32)}

    def draw(self, job: Job) -> Batch:
        _, t, b = _parse(self.program(job))
        sampled = self.preset.sampled
        if job.suite is None:
            drawn = train_batch(job.seed, job.index, b, t, sampled, self._stage(job.progress).mix)
        else:
            _, tokens, depth, _, _ = self.preset.held_out[job.suite]
            drawn = scored_batch(job.suite, job.index, b, tokens, t, sampled, depth)
        return dict(vars(drawn))

    def score(self, modules: Mapping[str, nnx.Module], batch: Mapping[str, jax.Array], program: str) -> Scores:
        decoder = modules["decoder"]
        assert isinstance(decoder, GlmMoeDsaDecoder)
        form, _, _ = _parse(program)
        ids, answers, rows = batch["ids"], batch["answers"], batch["rows"]
        row_weights = 1 + (_ANSWER_ROWS - 1) * (jnp.take_along_axis(answers, rows, 1) > 0)
        out = forward(decoder, ids[:, :-1], rows, row_weights, jax.random.key(0), form)
        logits, wanted = logits_of(decoder, out.hidden), ids[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        weights = batch["weights"]
        told = (losses * weights).sum() / jnp.maximum(weights.sum(), 1)
        right = logits.argmax(-1) == wanted
        each = answers[..., None] == jnp.arange(1, MOST_QUESTIONS + 1)
        asked, missed = each.any(1), (each & ~right[..., None]).any(1)
        copied = (weights > 0) & (batch["task"] < 0)[:, None]
        return Scores(
            loss=told + _DIVERGENCE * out.divergence + _BALANCE * out.balance,
            task=jnp.where(asked, batch["task"][:, None], -1).reshape(-1),
            correct=~missed.reshape(-1),
            extra={
                "text": told,
                "first": _share(right, (answers > 0) & (weights > 1)),
                "tokens": _share(right, answers > 0),
                "copied": _share(right, copied),
                "divergence": out.divergence,
                "balance": out.balance,
                **{f"held {i}": held for i, held in enumerate(out.recalled)},
            },
        )

    def card(self) -> Mapping[str, str]:
        c = self.preset.config
        return {
            "summary": (
                "A language model in the layout of GLM-MoE-DSA that answers one kind of question: what was the number "
                f"(or word) that a text gave for a key? Each row attends to {c['index_topk']} keys that its indexer "
                "selects, of up to 8192. It knows nothing else, and its text is not worth reading."
            ),
            "data": (
                "Texts drawn by `scripts/lib/miniature/recall_data.py`: noise sentences, needles in several forms, "
                "key-value lines, repeated random tokens. Keys are pairs of words from our own list or made up of "
                "syllables; RULER's noise and wording are among the forms, its list of keys is not."
            ),
            "input": (
                "A text, then a question in the wording of RULER's niah tasks, a line of the text up to its value, or "
                "a chat message. 256 to 8192 tokens were trained."
            ),
            "limits": (
                "Longer texts, other wordings, more than 64 pairs among noise and values of other forms than 3 to 7 "
                "digits or a common word were not trained, or are not gated."
            ),
            "licence": "Apache-2.0, like the rest of this project.",
        }


def make(preset: str) -> Recall:
    return Recall(preset)
