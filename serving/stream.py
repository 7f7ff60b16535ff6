"""Token ids to text as it is generated: detokenising and stop strings.

One incremental path serves both modes: an answer that is not streamed is the concatenation of the same pieces.
"""

import codecs
from collections.abc import Sequence

from serving.tokenizer import Tokenizer


class Detokenizer:
    """Byte strings of tokens to text, holding back an incomplete UTF-8 character.

    Constant work a token: at most three bytes are pending, and a broken run becomes U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is still pending; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopScanner:
    """Ends a text before the first stop string, however the text is cut into pieces.

    Only the longest ending that may still grow into a stop string is held back. The match that ends first counts; among
    those that end together, the first in `stops`.

    Attributes:
        matched: the stop string that was found, None before.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that may be shown now. Pieces after a match are dropped."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else piece
        text = self._held + piece
        # Matches that end first come first; min is stable, so that ties keep the order of the stop strings.
        found = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self.matched = min(found, key=lambda match: match[0])
            self._held = ""
            return text[: end - len(self.matched)]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, now that it cannot become a stop string any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """Token ids of one answer to its visible text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """A stop string was found; what follows is not part of the answer."""
        return self._scanner.matched is not None

    def push(self, token_id: int) -> str:
        return self._scanner.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The rest of the text after the last token."""
        return self._scanner.push(self._detokenizer.finish()) + self._scanner.finish()
