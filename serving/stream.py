"""Token ids to text as it is generated: detokenising and stop strings.

One incremental path serves both modes: an answer that is not streamed is the concatenation of the same pieces.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from serving.chat import AnswerParser, Delta, Text
from serving.tokenizer import Tokenizer


class Detokenizer:
    """Byte strings of tokens to text, holding back an incomplete UTF-8 character.

    Constant work a token: at most three bytes are pending, and a broken run becomes U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False):
        """special: special tokens are shown as their literal text instead of not at all."""
        self._token_bytes = partial(tokenizer.token_bytes, special=special)
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

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """include: the text ends after the stop string, not before it."""
        self._stops, self._include = tuple(stops), include
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
            return text[: end if self._include else end - len(self.matched)]
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


@dataclass(frozen=True)
class TextOptions:
    """How the text of an answer is shown and where it ends.

    stop: stop strings. include_stop: show the one that ended it. special: show special tokens. min_tokens: tokens whose
    text is not searched for stop strings: all before this one.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    special: bool = False
    min_tokens: int = 0


class AnswerStream:
    """Token ids of one answer to its deltas: text of its fields, and tool calls.

    Stop strings are looked for in the content only: one that cuts an answer short must not cut short the reasoning in
    front of it, or a call's arguments.

    Args:
        parser: None for plain text.

    Attributes:
        reasoning_tokens: tokens of the reasoning so far, its closing tag included.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions = TextOptions(), parser: AnswerParser | None = None):
        self._detokenizer = Detokenizer(tokenizer, special=options.special)
        self._scanner = StopScanner(options.stop, include=options.include_stop)
        self._searched_from, self._count = options.min_tokens, 0
        self._parser = parser or AnswerParser()
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """The answer is over by a stop string, or by its only call; what follows is not part of it."""
        return self._scanner.matched is not None or self._parser.stopped

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return self._scanner.matched

    @property
    def calls(self) -> int:
        """Completed tool calls."""
        return self._parser.calls

    def push(self, token_id: int) -> list[Delta]:
        self._count += 1
        self.reasoning_tokens += self._parser.reasoning
        deltas = self._parser.push(self._detokenizer.push(token_id))
        return deltas if self._count < self._searched_from else self._scanned(deltas)

    def finish(self, *, natural: bool = True) -> list[Delta]:
        """What is left after the last token. `natural`: the model ended the answer, it was not cut."""
        deltas = self._scanned(self._parser.push(self._detokenizer.finish()))
        deltas += self._scanned(self._parser.finish(natural=natural))
        held = self._scanner.finish()
        return [*deltas, Text("content", held)] if held else deltas

    def _scanned(self, deltas: list[Delta]) -> list[Delta]:
        shown: list[Delta] = []
        for delta in deltas:
            if self._scanner.matched is not None:
                break
            match delta:
                case Text("content", text):
                    text = self._scanner.push(text)
                    shown += [Text("content", text)] if text else []
                case _:
                    held = self._scanner.finish()  # a stop string does not reach over a call
                    shown += [Text("content", held), delta] if held else [delta]
        return shown
