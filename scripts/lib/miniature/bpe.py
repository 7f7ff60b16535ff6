"""A byte-level BPE tokenizer.json with a few hundred words.

A word is merged only together with the space before it, letter by letter from the left (` c`, ` co`, ` col`, ...).
So ordinary words of a question are one token each, while text without a space before it is one token a character,
always: what a model spells out or copies is spelled the same way wherever it stands.
"""

import json
from collections.abc import Iterable, Sequence

_SPACE = "Ġ"


def _alphabet() -> list[str]:
    """The characters of byte-level BPE in the order of their ids (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(0x100 + k) for k in range(len(others)))]


def tokenizer_json(words: Iterable[str], special: Sequence[str], starts: Iterable[str] = ()) -> str:
    """words: merged after a space, ASCII. starts: merged from their own first letter, wherever they stand (the first
    words of a prompt); two letters each at least. special: the added tokens, which take the last ids in order."""
    vocabulary = {token: i for i, token in enumerate(_alphabet())}
    merges: list[list[str]] = []
    for chain in [*(_SPACE + word for word in sorted(set(words))), *sorted(set(starts))]:
        for end in range(2, len(chain) + 1):
            if chain[:end] not in vocabulary:
                merges.append([chain[: end - 1], chain[end - 1]])
                vocabulary[chain[:end]] = len(vocabulary)
    added = [
        {
            "id": len(vocabulary) + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": merges,
            },
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )
