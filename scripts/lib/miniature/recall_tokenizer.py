"""Recall's tokenizer: byte-level BPE of 1024 tokens, one token a digit, trained on made-up text."""

import json
import random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from scripts.lib.miniature.recall_words import (
    ADJECTIVES,
    CALLED,
    CHAT_QUESTIONS,
    FORMS,
    NOISE,
    NOUNS,
    RULER_NOISE,
    SYLLABLES,
)

VOCAB = 1024
END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
# Words with the space before them, digits one by one, signs, single white space: pieces that never merge.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}<|assistant|>{{ message.content }}<|endoftext|>"
    "{%- else -%}<|user|>{{ message.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def made_up_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3, 3, 4))))


def _corpus() -> list[str]:
    rng = random.Random(0)
    lines = [*RULER_NOISE, *NOISE] * 200
    for form in FORMS:
        for called in CALLED:
            lines += [part.replace("{k}", "").replace("{v}", "").replace("{n}", called) for part in form] * 200
    lines += [q.replace("{k}", "").replace("{n}", called) for q in CHAT_QUESTIONS for called in CALLED] * 100
    for _ in range(20):
        lines += [f" {a}-{rng.choice(NOUNS)}" for a in ADJECTIVES] + [f"{rng.choice(ADJECTIVES)}-{n}" for n in NOUNS]
    lines += [f" {made_up_word(rng)}-{made_up_word(rng)}" for _ in range(8000)]
    return lines


def build_tokenizer() -> tokenizers.Tokenizer:
    """Trained anew, in a second; the same each time."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 3, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([END, USER, ASSISTANT])
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {VOCAB}")
    return tokenizer


def tokenizer_files(longest: int) -> dict[str, str]:
    """File name -> text of what a checkpoint folder holds beside config.json and the weights."""
    tokenizer = build_tokenizer()
    end, user = tokenizer.token_to_id(END), tokenizer.token_to_id(USER)
    config = {
        "backend": "tokenizers",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": longest,
        "tokenizer_class": "TokenizersBackend",
    }
    generation = {"_from_model_config": True, "eos_token_id": [end, user], "pad_token_id": end, "use_cache": True}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        "chat_template.jinja": CHAT_TEMPLATE,
    }
