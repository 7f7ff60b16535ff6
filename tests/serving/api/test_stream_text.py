"""Detokenising and stop strings give the same text however it is cut."""

import random
from collections.abc import Sequence

import pytest

from serving.chat import Message
from serving.stream import AnswerStream, Detokenizer, StopScanner, TextOptions
from tests.serving.api.harness import TOKENIZER

TEXTS = ["plain", "naïve café", "日本語のテキスト", "a👩‍👩‍👧b🇯🇵", "mixed é 字 🙂 end"]


def content(stream: AnswerStream, ids: Sequence[int]) -> str:
    message = Message()
    for token_id in ids:
        message.add(stream.push(token_id))
    return message.add(stream.finish()).content


def test_text_comes_back_whole_from_single_byte_tokens():
    for text in TEXTS:
        detokenizer = Detokenizer(TOKENIZER)
        pieces = [detokenizer.push(token_id) for token_id in TOKENIZER.encode_plain(text)]
        assert "".join(pieces) + detokenizer.finish() == text
        assert "\ufffd" not in "".join(pieces)


def test_no_piece_holds_part_of_a_character():
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token_id) for token_id in TOKENIZER.encode_plain("🙂")]
    assert pieces == ["", "", "", "🙂"]


def test_a_broken_character_becomes_a_replacement_and_does_not_stall():
    ids = [*TOKENIZER.encode_plain("🙂")[:2], *TOKENIZER.encode_plain("ok")]
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(map(detokenizer.push, ids)) == "\ufffdok"
    assert detokenizer.finish() == ""


def test_an_answer_cut_inside_a_character_ends_in_a_replacement():
    assert content(AnswerStream(TOKENIZER), TOKENIZER.encode_plain("a🙂")[:3]) == "a\ufffd"


def test_special_tokens_and_padded_ids_have_no_text():
    assert content(AnswerStream(TOKENIZER), [257, 258, 261, 271, 5000]) == ""


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, restated: cut at the stop string whose end comes first, ties by list order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(40))
def test_every_way_of_cutting_a_text_gives_the_same_answer(seed: int):
    choice = random.Random(seed)
    text = "".join(choice.choice("ab🙂\n") for _ in range(choice.randrange(1, 13)))
    stops = [
        "".join(choice.choice("ab🙂\n") for _ in range(choice.randrange(1, 4))) for _ in range(choice.randrange(4))
    ]
    expected, matched = whole(text, stops)
    for cuts in (
        range(2 ** (len(text) - 1)) if len(text) < 9 else [choice.getrandbits(len(text) - 1) for _ in range(200)]
    ):
        pieces, start = [], 0
        for k in range(1, len(text) + 1):
            if k == len(text) or cuts >> (k - 1) & 1:
                pieces.append(text[start:k])
                start = k
        scanner = StopScanner(stops)
        shown = [scanner.push(piece) for piece in pieces]
        assert "".join(shown) + scanner.finish() == expected, (text, stops, pieces)
        assert scanner.matched == matched


def test_only_what_may_become_a_stop_string_is_held_back():
    scanner = StopScanner(["END", "\n\n"])
    assert [scanner.push(piece) for piece in ("abc", "E", "N", "x", "\n", "y")] == ["abc", "", "", "ENx", "", "\ny"]
    assert scanner.finish() == ""


def test_nothing_follows_a_stop_string():
    scanner = StopScanner(["STOP"])
    assert [scanner.push(piece) for piece in ("a ST", "OP b", "c")] == ["a ", "", ""]
    assert scanner.finish() == ""
    assert scanner.matched == "STOP"


def test_a_stop_string_may_be_the_whole_answer():
    stream = AnswerStream(TOKENIZER, TextOptions(stop=("hé",)))
    assert content(stream, TOKENIZER.encode_plain("hé")) == ""
    assert stream.stopped
