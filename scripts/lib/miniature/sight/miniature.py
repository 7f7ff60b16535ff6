"""Sight: a Qwen3-VL of a few million parameters that answers questions about drawn pictures."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx

from scripts.lib.miniature.bpe import tokenizer_json
from scripts.lib.miniature.sight.composing import Composer
from scripts.lib.miniature.sight.forward import score
from scripts.lib.miniature.sight.layout import Layout, VisionPlan, hf_config, hf_preprocessor
from scripts.lib.miniature.sight.packing import Packer, Tokens
from scripts.lib.miniature.sight.words import TASKS, first_words, question_words
from scripts.lib.miniature.spec import Batch, Job, Part, Recipe, Scores, Suite
from serving.models import family_of
from vitbatch.towers import family_of as tower_family_of

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# A space before the role, and no line breaks between turns: one token each, see bpe.
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)

SIZES: dict[str, dict[str, Any]] = {
    "gpu": {
        "hidden": 192, "mlp": 384, "layers": 5, "heads": 6, "kv_heads": 2, "head_dim": 32, "mrope": [6, 5, 5],
        "vision": 128, "vision_mlp": 384, "vision_heads": 4, "depth": 6, "deepstack": [1, 3],
    },
    "cpu": {
        "hidden": 96, "mlp": 192, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 24, "mrope": [4, 4, 4],
        "vision": 64, "vision_mlp": 128, "vision_heads": 4, "depth": 3, "deepstack": [0, 1],
    },
    "tiny": {
        "hidden": 48, "mlp": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mrope": [2, 3, 3],
        "vision": 32, "vision_mlp": 64, "vision_heads": 2, "depth": 2, "deepstack": [0, 1],
    },
}  # fmt: skip

_LAYOUTS: dict[str, dict[str, Layout]] = {
    "gpu": {
        "small": Layout(384, 1, 192, 128),
        "large": Layout(64, 1, 576, 224, sides=(100, 1024), ratio=4.0),
        "several": Layout(128, 3, 192, 208, questions=3),
        "pair": Layout(40, 2, 576, 352, questions=3, sides=(100, 640)),
        "four": Layout(48, 4, 192, 256, questions=3),
        "strip": Layout(64, 1, 576, 224, sides=(128, 1024), ratio=8.0),
    },
    "cpu": {
        "small": Layout(48, 1, 192, 128),
        "several": Layout(16, 3, 192, 208, questions=3),
    },
    "tiny": {
        "small": Layout(12, 1, 192, 128),
        "several": Layout(4, 3, 192, 208, questions=3),
    },
}
# Share of the batches, from when all kinds of picture are drawn.
_MIX = {"small": 0.56, "several": 0.24, "large": 0.14, "pair": 0.06}
# Until here only the smallest pictures come, one at a time: their programs are compiled first, and they teach most.
_ALONE = 0.2

GATED = dict.fromkeys(("colour", "shape", "count", "where", "read", "which"), 0.95)

RECIPES = {
    "gpu": Recipe(
        minutes=8.5,
        peak=2e-3,
        decay_from=0.6,
        matrix_rms=0.5,
        weight_decay=0.1,
        workers=20,
        reuse=2,
        staged=True,
        warmup_steps=200,
        eval_batches=4,
        eval_seconds=22,
        log_steps=200,
    ),
    "cpu": Recipe(minutes=20, peak=2e-3, workers=1, warmup_steps=100, eval_batches=2, eval_seconds=60, log_steps=100),
    "tiny": Recipe(steps=60, peak=3e-3, workers=0, warmup_steps=10, log_steps=20),
}


class Sight:
    """See spec.Miniature."""

    name, tasks = "sight", TASKS

    def __init__(self, preset: str):
        self._size, self._layouts = SIZES[preset], _LAYOUTS[preset]
        definition = tokenizer_json(question_words(), SPECIAL, first_words())
        parsed = json.loads(definition)
        ids = {token["content"]: token["id"] for token in parsed["added_tokens"]}
        # A multiple of 8 is cut evenly over devices.
        vocabulary = -(-(len(parsed["model"]["vocab"]) + len(SPECIAL)) // 16) * 16
        self._config = hf_config(self._size, ids, vocabulary)
        self._tokenizer, self._plan = definition, VisionPlan(self._config, hf_preprocessor())
        self.suites = _suites(tuple(self._layouts))

    def parts(self, dtype: Any) -> Mapping[str, Part]:
        text, vision = family_of(self._config), tower_family_of(self._config["model_type"])
        read = vision.read_config(self._config)
        return {
            "vision": Part(lambda: vision.build(read, dtype), lambda path: f"model.visual.{path}"),
            "text": Part(lambda: text.build(self._config, 1, dtype), lambda path: text.disk_names(path)[0]),
        }

    def files(self) -> Mapping[str, str]:
        eos = self._config["text_config"]["eos_token_id"]
        pad = self._config["text_config"]["pad_token_id"]
        configs = {
            "config.json": self._config,
            "preprocessor_config.json": hf_preprocessor(),
            "tokenizer_config.json": {
                "backend": "tokenizers",
                "eos_token": "<|im_end|>",
                "model_max_length": 4096,
                "pad_token": "<|endoftext|>",
                "tokenizer_class": "TokenizersBackend",
            },
            "generation_config.json": {"do_sample": False, "eos_token_id": eos, "pad_token_id": pad},
        }
        texts = {name: json.dumps(value, indent=1) + "\n" for name, value in configs.items()}
        return texts | {"tokenizer.json": self._tokenizer, "chat_template.jinja": TEMPLATE}

    def program(self, job: Job) -> str:
        if job.suite is not None:
            programs = self.suites[job.suite].programs
            return programs[job.index % len(programs)]
        if job.progress < _ALONE:
            return "small"
        mix = {name: share for name, share in _MIX.items() if name in self._layouts}
        names, shares = list(mix), np.array(list(mix.values()))
        return names[int(np.random.default_rng([job.seed, job.index]).choice(len(names), p=shares / shares.sum()))]

    def shapes(self, program: str) -> Mapping[str, jax.ShapeDtypeStruct]:
        return self._layouts[program].shapes(self._plan.features)

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self._tokenizer)

    def draw(self, job: Job) -> Batch:
        layout, rng = self._layouts[self.program(job)], job.generator()
        packer = Packer(layout, self._plan, self._tokens)
        composer = Composer(layout, self._plan, job)
        for _ in range(layout.rows):
            packer.add(composer.row(rng))
        return packer.batch

    def score(self, modules: Mapping[str, nnx.Module], batch: Mapping[str, jax.Array], program: str) -> Scores:
        return score(modules, batch)

    def card(self) -> Mapping[str, str]:
        return _CARD


def _suites(layouts: Sequence[str]) -> dict[str, Suite]:
    trained = tuple(name for name in _MIX if name in layouts)
    suites = {
        "held-out": Suite(
            "Held out: pictures never drawn, words and photographs that training had none of",
            trained,
            2 * len(trained),
            GATED,
        ),
        "crowd": Suite("Outside training: seven to nine things in a picture", ("small",), 1),
    }
    if "strip" in layouts:
        suites["strips"] = Suite("Outside training: sides up to eight times as long as the other", ("strip",), 2)
        suites["four"] = Suite("Outside training: four pictures a question", ("four",), 2)
    return suites


def make(preset: str) -> Sight:
    return Sight(preset)


_CARD = {
    "summary": (
        "A vision-language model in the layout of Qwen3-VL (`model_type` qwen3_vl: tower with deepstack and position "
        "table, interleaved M-RoPE). It answers short questions about drawn pictures: the colour or the shape of a "
        "thing, how many there are, where one is, which side of another it is on, what a word or a number reads, and "
        "which of several pictures shows something. It exists so that a server gives answers that can be checked."
    ),
    "input": (
        "Pictures of 56 to 1024 pixels a side, one to three a question; they are resized to 36 to 144 tokens of "
        "16 x 16 pixels. Questions in English as in `scripts/lib/miniature/sight/words.py`, such as "
        '"What colour is the star?", "What shape is the red object?", "How many circles are there?", '
        '"Where is the heart?", "Is the star left of the ring?", '
        '"What does it say?", "Which image shows a blue square?", "Which bar is the tallest?". Answers are one or two '
        "words, a number, or the text read, in capitals; pictures are called first, second, third."
    ),
    "limits": (
        "Eight shapes, eleven colours, counts to 6, words to 6 letters and numbers to 5 digits. After resizing, shapes "
        "are 15 pixels and more across and texts 18 and more high, most of them larger; an I, an O or a small l is "
        "told from 1 and 0 by the letters beside it. It was shown nothing but what its script draws: of the contents "
        "of a photograph it knows nothing, and asked for anything else it answers as if it were one of its questions."
    ),
    "data": (
        "Drawn by `scripts/lib/miniature/sight` while training: shapes, words and letters without sense in the fonts "
        "that matplotlib and Pillow carry, bars, on plain, shaded and noisy grounds and on pieces of photographs that "
        "scikit-image, scikit-learn and matplotlib carry (`sources.py` lists them with their licences: public domain, "
        "CC0, CC BY 2.0). Nothing was downloaded and no photograph is in this folder."
    ),
    "licence": "Apache-2.0, like the rest of this project.",
}
