"""Text to token ids and back to bytes, from a checkpoint's `tokenizer.json`.

Only byte-level BPE is supported: it is what every family here ships, and it gives each token a fixed byte string, so
that an answer can be decoded token by token without looking back.

Two encoders are held. One knows the added tokens (`<|im_start|>`, `<|image_pad|>`, ...), the other does not, so that
text typed by a caller can be encoded as the plain text it is.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

_PROBED_IDS = 256
# While a text is encoded, a token of it takes about 140 bytes, and a byte may be one.
_BYTES_A_TOKEN = 8
_PIECE_CHARS = 1 << 14
# Read by the parsers of answers (serving.chat), whatever a checkpoint's files call them.
_MARKUP = frozenset(f"<{end}{name}>" for name in ("think", "tool_call", "arg_key", "arg_value") for end in ("", "/"))
# GLM's frame around a final answer, which its files do not always call special.
_FRAME = frozenset({"<|begin_of_box|>", "<|end_of_box|>"})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one when there is no file.

    Raises:
        ValueError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}); restore the file") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: holds a {type(loaded).__name__}, not an object; restore the file")
    return loaded


def token_text(entry: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


class Tokenizer:
    """A byte-level BPE tokenizer and the token ids that have a meaning to the server.

    Args:
        definition: the text of a `tokenizer.json`.
        eos_ids: ids that end an answer.
        eos_token: a token that ends an answer too, by its text.
        image_token_id: the placeholder of one image, None for a text-only checkpoint.
        reserved_ids: ids that a caller may not send as plain tokens (image and video placeholders).
        vocab_size: rows of the model's embedding table; None takes the tokenizer's own size.

    Attributes:
        special_ids: ids that never appear in decoded text.

    Raises:
        ValueError: not byte-level BPE, or an added token is matched in a way that splitting at its literal text does
            not reproduce.
    """

    def __init__(
        self,
        definition: str,
        *,
        eos_ids: frozenset[int] = frozenset(),
        eos_token: str | None = None,
        image_token_id: int | None = None,
        reserved_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
    ):
        parsed = json.loads(definition)
        if not _is_byte_level(parsed.get("decoder")):
            raise ValueError(
                "tokenizer.json: the decoder is not ByteLevel; only byte-level BPE tokenizers are supported"
            )
        self._full = _load(parsed)
        self._plain = _load(parsed | {"added_tokens": []})

        added = self._full.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        literals = sorted(self._added_ids, key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, literals))) if literals else None
        self.added_initials = frozenset(literal[0] for literal in literals)

        named_id = None if eos_token is None else self._full.token_to_id(eos_token)
        self.eos_ids = eos_ids if named_id is None else eos_ids | {named_id}
        hidden = {i for i, token in added.items() if token.content in _FRAME or token.special}
        shown = {i for i, token in added.items() if token.content in _MARKUP}
        self.special_ids = frozenset((hidden - shown) | self.eos_ids)
        self.image_token_id = image_token_id
        self.reserved_ids = reserved_ids
        self.vocab_size = vocab_size or self._full.get_vocab_size(with_added_tokens=True)
        self._bytes = self._byte_table()
        self._special_bytes = {i: token.content.encode() for i, token in added.items() if i in self.special_ids}
        self._check()

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> "Tokenizer":
        """Read `tokenizer.json`, and what exists of the tokenizer's, generation's and model's config files.

        The ids that end an answer are the union of what those three name: GLM lists three in
        generation_config.json, and stopping at the first alone lets the model invent its user's next turn.

        Raises:
            FileNotFoundError: there is no `tokenizer.json`.
            ValueError: a file is damaged, or the tokenizer is not supported.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; copy the checkpoint's tokenizer.json into the folder")
        config = read_json(folder / "config.json")
        text_config = config.get("text_config")
        text_config = text_config if isinstance(text_config, dict) else {}

        eos_ids: set[int] = set()
        for source in (read_json(folder / "generation_config.json"), config, text_config):
            named = source.get("eos_token_id")
            eos_ids.update(i for i in (named if isinstance(named, list) else [named]) if isinstance(i, int))
        placeholders = (config.get("image_token_id"), config.get("video_token_id"))
        try:
            return cls(
                path.read_text(encoding="utf-8"),
                eos_ids=frozenset(eos_ids),
                eos_token=token_text(read_json(folder / "tokenizer_config.json").get("eos_token")),
                image_token_id=config.get("image_token_id"),
                reserved_ids=frozenset(i for i in placeholders if isinstance(i, int)),
                vocab_size=text_config.get("vocab_size") or config.get("vocab_size"),
            )
        except Exception as error:
            # tokenizers raises bare Exception, and a file of another shape fails in whatever is read first.
            raise ValueError(f"{path} is not a usable tokenizer: {error or type(error).__name__}") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: added tokens are matched, and the tokenizer's own prefix tokens are put in front."""
        return _ids(self._full, text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is an added token, whatever it looks like."""
        return _ids(self._plain, text)

    def encode_rendered(self, text: str, restore: Callable[[str], str] = str) -> list[int]:
        """Ids of a rendered chat template.

        Added tokens are matched in `text` first; `restore` is then applied to what lies between them, which is encoded
        as plain text in one pass. A caller's text that was hidden from the matching (`chat.Shield`) is brought back by
        `restore` without becoming a control token, and merges with the template's plain text around it as usual.
        """
        ids: list[int] = []
        for literal, plain in self._split(text):
            if plain:
                ids += self.encode_plain(restore(plain))
            if literal:
                ids.append(self._added_ids[literal])
        return ids

    def is_far_over(self, text: str, most: int) -> bool:
        """Whether encoding the whole text would be wasted on many more than `most` tokens, told at the cost of encoding
        a few times `most`. A text that is only somewhat longer is left to be encoded."""
        if len(text.encode()) <= _BYTES_A_TOKEN * most:
            return False
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            count += len(_encoding(self._full, text[start : start + _PIECE_CHARS]))
            # A cut makes a token or two more than there are, and never twice as many.
            if count > 2 * most:
                return True
        return False

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; none for an id of the vocabulary's padding, and for a special token unless
        `special`, which gives its literal text."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._special_bytes.get(token_id, b"") if special else b""
        return found

    def _split(self, text: str) -> Iterator[tuple[str | None, str]]:
        """Pairs of (added token or None, plain text in front of it)."""
        start = 0
        if self._added_pattern is not None:
            for match in self._added_pattern.finditer(text):
                yield match.group(), text[start : match.start()]
                start = match.end()
        yield None, text[start:]

    def _byte_table(self) -> dict[int, bytes]:
        alphabet = _byte_alphabet()
        table = {}
        for token, token_id in self._full.get_vocab(with_added_tokens=True).items():
            if token_id in self.special_ids:
                continue
            if token in self._added_ids or not alphabet.keys() >= set(token):
                table[token_id] = token.encode()
            else:
                table[token_id] = bytes(alphabet[character] for character in token)
        return table

    def _check(self) -> None:
        """Compare our splitting and our byte table with the tokenizer's own encode and decode."""
        for literal in self._added_ids:
            probe = f"a {literal} b\n{literal}c"
            if self.encode_rendered(probe) != self._full.encode(probe, add_special_tokens=False).ids:
                raise ValueError(
                    f"tokenizer.json: added token {literal!r} takes neighbouring text with it "
                    "(lstrip, rstrip, single_word or a normaliser); such tokenizers are not supported"
                )
        ordinary = sorted(self._bytes.keys() - self._added_ids.values())
        for token_id in ordinary[:: max(1, len(ordinary) // _PROBED_IDS)]:
            decoded = self._bytes[token_id].decode("utf-8", "replace")
            if self._full.decode([token_id], skip_special_tokens=False) != decoded:
                raise ValueError(
                    f"tokenizer.json: token {token_id} does not decode to its bytes; "
                    "only plain byte-level BPE tokenizers are supported"
                )


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return _encoding(tokenizer, text, add_special_tokens=add_special_tokens).ids


def _encoding(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
    # `encode` keeps the interpreter to itself until it is done, which is seconds for millions of characters. The form
    # for batches does not.
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding


def _load(parsed: dict[str, Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return [part["type"] for part in decoder["decoders"]] == ["ByteLevel"]
    return decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2, Radford et al. 2019).

    Printable bytes stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + k): byte for k, byte in enumerate(others)}
