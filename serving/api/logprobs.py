"""Log-probabilities of an answer's tokens in the forms of the two routes.

A token's text and bytes come from the tokenizer's byte table, so that parts of a character keep their bytes; special
tokens show their literal text.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from serving.protocol import TokenEvent, TokenLogprobs
from serving.tokenizer import Tokenizer


class ChatLogprobs:
    """`logprobs` of a chat's choices and chunks."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def body(self, tokens: Sequence[TokenEvent]) -> dict[str, Any] | None:
        """None when there is nothing to tell."""
        entries = [self._entry(event.token_id, event.logprobs) for event in tokens if event.logprobs is not None]
        return {"content": entries, "refusal": None} if entries else None

    def _entry(self, token_id: int, told: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(other, logprob) for other, logprob in told.top]
        return self._token(token_id, told.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id, special=True)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionLogprobs:
    """`logprobs` of one choice of a completion: parallel arrays, which go on from chunk to chunk.

    `text_offset` counts characters from the start of the choice's text. A token that begins inside a character has the
    offset of that character.

    Args:
        prompt_ids: tokens of an echoed prompt; they come first, the first of them with nothing to tell.
        as_ids: write tokens as `token_id:N`, which keeps those apart that look alike.
        special: the answer's text shows special tokens; that of an echoed prompt always does.
        only_prompt: what is generated is not part of the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        as_ids: bool = False,
        special: bool = False,
        only_prompt: bool = False,
    ):
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids
        self._as_ids, self._special, self._only_prompt = as_ids, special, only_prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, tokens: Sequence[TokenEvent]) -> dict[str, Any] | None:
        """None when there is nothing to tell."""
        entries: list[tuple[int, TokenLogprobs | None, bool]] = []
        for event in tokens:
            if event.prompt is not None:
                told = (None, *event.prompt)
                entries += [(i, t, True) for i, t in zip(self._prompt_ids, told, strict=True)]
            if event.logprobs is not None and not self._only_prompt:
                entries.append((event.token_id, event.logprobs, False))
        if not entries:
            return None
        return {
            "tokens": [self._text(token_id) for token_id, *_ in entries],
            "token_logprobs": [told and told.logprob for _, told, _ in entries],
            "top_logprobs": [told and self._top(token_id, told) for token_id, told, _ in entries],
            "text_offset": [self._advance(token_id, in_prompt or self._special) for token_id, _, in_prompt in entries],
        }

    def _top(self, token_id: int, told: TokenLogprobs) -> dict[str, float]:
        """The best tokens and the chosen one. Of tokens that look alike the likeliest is told."""
        top: dict[str, float] = {}
        for other, logprob in (*told.top, (token_id, told.logprob)):
            top.setdefault(self._text(other), logprob)
        return top

    def _text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id, special=True).decode("utf-8", "replace")

    def _advance(self, token_id: int, special: bool) -> int:
        """Where the token begins; then the offset is past it."""
        start = self._offset
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id, special=special)))
        return start
