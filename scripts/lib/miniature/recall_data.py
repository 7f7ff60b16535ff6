"""Texts to train and to score Recall on, as token ids. No jax here: worker processes import this alone.

A row is one document: noise lines with needles ("amber-fox = 48213" in one of several forms) somewhere among them, then
questions about some of the needles, each with its answer and the end token. Only answers count fully in the loss.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from scripts.lib.miniature.recall_tokenizer import ASSISTANT, END, USER, build_tokenizer, made_up_word
from scripts.lib.miniature.recall_words import (
    ADJECTIVES,
    CALLED,
    CHAT_QUESTIONS,
    FORMS,
    NOISE,
    NOUNS,
    RULER_NOISE,
)

Tokens = list[int]


TASKS = ("ruler", "needle", "pairs")
"""One needle in RULER's form; one asked of a few needles in any noise; key-value pairs, up to 64 when scored."""
MOST_QUESTIONS = 32
_FIRST = 3.0
"""What the first token of a value counts, a later one 1: it alone asks which key was meant, the others follow it."""
_CONTEXT, _UNASKED = 0.1, 64.0
"""The most that all other tokens of a row may count: so much of its answers; in all, where nothing is asked."""
_MERGED = range(256, 1000)
"""Tokens that are more than a byte and nothing special."""


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of rows; a row of a few needles in noise ("needle") else.

    repeats: random tokens of which parts come again, a signal at every token for the heads that copy.
    associations: keys and values of random tokens, a question at every other line for the heads that match keys.
    pairs, ruler: see TASKS. context_weight: of all that is no answer, in the loss.
    """

    repeats: float
    associations: float
    pairs: float
    ruler: float
    context_weight: float


@dataclass(frozen=True)
class Batch:
    """ids [B, T + 1]; weights [B, T]: of predicting ids[:, 1:]; rows [B, R]: query rows on which the indexer learns,
    those of answers first; answers [B, T]: the answer's number (from 1), 0 elsewhere; task [B]: index into TASKS, -1
    where nothing is asked."""

    ids: np.ndarray
    weights: np.ndarray
    rows: np.ndarray
    answers: np.ndarray
    task: np.ndarray


class Writer:
    """Everything encoded once. A piece of text with a space before it is another token than without, so words are kept
    in both forms."""

    def __init__(self):
        self.tokenizer = build_tokenizer()

        def encode(text: str) -> Tokens:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        self.encode = encode
        self.end, self.user, self.assistant = (encode(token)[0] for token in (END, USER, ASSISTANT))
        self.newline, self.space, self.hyphen = encode("\n")[0], encode(" ")[0], encode("-")[0]
        self.digits = [encode(str(d))[0] for d in range(10)]
        self.signs = [encode(sign) for sign in ("", " ", ":", " =", ": ", " is ")]
        self.ruler = encode(" ".join(RULER_NOISE))
        self.noise = [encode(line) for line in NOISE]
        self.spaced_noise = [encode(" " + line) for line in NOISE]
        self.words = [(encode(w), encode(" " + w)) for w in (*ADJECTIVES, *NOUNS)]
        rng = random.Random(1)
        self.adjectives, self.nouns = self.words[: len(ADJECTIVES)], self.words[len(ADJECTIVES) :]
        made_up = [made_up_word(rng) for _ in range(6000)]
        self.made_up = [(encode(w), encode(" " + w)) for w in made_up]
        self.forms = [[self._form(form, called) for called in CALLED] for form in FORMS]
        self.chat = [[self._parts(q, called) for called in CALLED] for q in CHAT_QUESTIONS]

    def _parts(self, text: str, called: str) -> list[tuple[str, bool] | Tokens]:
        """Token lists and (slot, whether a space stands before it)."""
        parts: list[tuple[str, bool] | Tokens] = []
        for piece in re.split(r"( ?\{[kv]\})", text.replace("{n}", called)):
            if piece.endswith("}"):
                parts.append((piece[-2], piece.startswith(" ")))
            elif piece:
                parts.append(self.encode(piece))
        return parts

    def _form(self, form: tuple[str, ...], called: str) -> list:
        return [self._parts(text, called) for text in form]

    def key(self, rng: random.Random) -> tuple[Tokens, Tokens]:
        """A name of two words, made-up ones included, or one; without and with a space before it."""
        first, second = (self.adjectives, self.nouns) if rng.random() < 0.55 else (self.made_up, self.made_up)
        a = rng.choice(first)
        if rng.random() < 0.1:
            return a
        b = [self.hyphen, *rng.choice(second)[0]]
        return a[0] + b, a[1] + b

    def value(self, rng: random.Random, digits: int | None = None) -> tuple[Tokens, Tokens]:
        """A number of `digits` digits (any few where None, a word now and then)."""
        if digits is None:
            if rng.random() < 0.3:
                return rng.choice(self.words)
            digits = rng.choice((3, 3, 4, 5, 5, 6, 7, 7))
        number = [self.digits[rng.randrange(1, 10)], *(self.digits[rng.randrange(10)] for _ in range(digits - 1))]
        return number, [self.space, *number]


@cache
def writer() -> Writer:
    return Writer()


def fill(parts: list, key: tuple[Tokens, Tokens], value: tuple[Tokens, Tokens] | None) -> tuple[Tokens, list[bool]]:
    """The tokens of a form, and which of them belong to the value."""
    ids: Tokens = []
    of_value: list[bool] = []
    for part in parts:
        if isinstance(part, tuple):
            slot, spaced = part
            chosen = key if slot == "k" else value
            assert chosen is not None
            part, mark = chosen[spaced], slot == "v"
        else:
            mark = False
        ids += part
        of_value += [mark] * len(part)
    return ids, of_value


class Row:
    """Tokens with the weight of predicting each, and the number of the answer each belongs to."""

    def __init__(self, task: int = -1):
        self.task = task
        self.ids: Tokens = []
        self.weights: list[float] = []
        self.answers: list[int] = []

    def add(self, ids: Tokens, weights: list[float] | float, answer: int = 0) -> None:
        self.ids += ids
        self.weights += weights if isinstance(weights, list) else [weights] * len(ids)
        self.answers += [answer] * len(ids)


def noise_lines(w: Writer, rng: random.Random, tokens: int, ruler: bool) -> list[Tokens]:
    """Lines of noise of up to `tokens` tokens, newlines included."""
    kind = 0.0 if ruler else rng.random()
    if kind < 0.3:
        unit = w.ruler
        count = tokens // (len(unit) + 1)
        return [unit] * count
    lines, used = [], 0
    if kind < 0.6:  # a paragraph of its own, again and again
        chosen = [rng.randrange(len(w.noise)) for _ in range(rng.randrange(1, 6))]
        unit = w.noise[chosen[0]] + [t for i in chosen[1:] for t in w.spaced_noise[i]]
        return [unit] * (tokens // (len(unit) + 1))
    while True:
        if kind < 0.9:
            line = rng.choice(w.noise)
        else:
            line = rng.choice(w.words)[0] + [t for _ in range(rng.randrange(3, 12)) for t in rng.choice(w.words)[1]]
        used += len(line) + 1
        if used > tokens:
            return lines
        lines.append(line)


def document(
    rng: random.Random,
    length: int,
    *,
    needles: int | None,
    questions: int,
    form: list | None = None,
    chat: bool = False,
    digits: int | None = None,
    ruler: bool = False,
    context_weight: float = 0.0,
    depth: float | None = None,
) -> Row:
    """A document of at most `length` tokens. needles: None fills the text with them. depth: of the first needle, 0 the
    first line, 1 the last; random where None."""
    w = writer()
    if form is None:
        form = rng.choice(rng.choice(w.forms))
    header, needle, question, lead = form
    pairs, keys = [], set()

    def more() -> int:
        while True:
            key = w.key(rng)
            if tuple(key[0]) not in keys:
                break
        keys.add(tuple(key[0]))
        value = w.value(rng, digits)
        pairs.append((key, value, fill(needle, key, value)))
        return len(pairs[-1][2][0]) + 1

    for _ in range(needles or questions):
        more()
    asked = [0] if depth is not None else rng.sample(range(len(pairs)), min(questions, len(pairs)))
    chat_form = rng.choice(rng.choice(w.chat)) if chat else None
    turns = []
    for number, i in enumerate(asked, 1):
        key, value, _ = pairs[i]
        if chat_form is not None:
            ask = ([w.user] if number > 1 else [w.newline]) + fill(chat_form, key, None)[0] + [w.assistant]
            turns.append((ask, [*value[0], w.end]))
        else:
            ask = [w.newline, *fill(question, key, None)[0], *fill(lead, key, None)[0]]
            turns.append((ask, [*value[1], w.end]))
    row = Row()
    if chat:
        row.add([w.user], context_weight)
    elif header:
        row.add([*fill(header, ([], []), None)[0], w.newline], context_weight)
    room = length - len(row.ids) - 1
    # What does not fit is left out: needles that nobody asks for first, then the last question with its needle.
    while (used := sum(len(p[2][0]) + 1 for p in pairs)) + sum(len(a) + len(b) for a, b in turns) > room:
        spare = [i for i in range(len(pairs)) if i not in asked]
        gone = spare[-1] if spare else asked[-1]
        if not spare:
            asked, turns = asked[:-1], turns[:-1]
        del pairs[gone]
        asked = [i - (i > gone) for i in asked]
    room -= sum(len(a) + len(b) for a, b in turns)
    if needles is None:
        while used < room - 40:
            used += more()
    tail = Row()
    for number, (ask, answer) in enumerate(turns, 1):
        tail.add(ask, context_weight)
        tail.add(answer, told(answer), number)
    lines: list[tuple[Tokens, list[float]]] = [
        (line, [context_weight] * len(line)) for line in noise_lines(w, rng, room - used, ruler)
    ]
    # A value that is seen for the first time cannot be told: nothing is learned from it.
    texts = [(ids, [0.0 if v else context_weight for v in of_value]) for _, _, (ids, of_value) in pairs]
    order = list(range(1, len(texts))) if depth is not None else list(range(len(texts)))
    places = [rng.random() if rng.random() < 0.9 else rng.choice((0.0, 1.0)) for _ in order]
    placed = sorted(zip(places, order, strict=True))
    if depth is not None:
        placed = sorted([*placed, (depth, 0)])
    total, merged, at = len(lines), [], 0
    for place, i in placed:
        stop = round(place * total)
        merged += lines[at:stop]
        merged.append(texts[i])
        at = stop
    merged += lines[at:]
    for n, (ids, weights) in enumerate(merged):
        if n:
            row.add([w.newline], context_weight)
        row.add(ids, weights)
    row.ids += tail.ids
    row.weights += tail.weights
    row.answers += tail.answers
    return row


def repeats(rng: random.Random, length: int) -> Row:
    w, row = writer(), Row()
    parts: list[Tokens] = []
    # Few different tokens make single ones ambiguous: more than the token before must be matched.
    low = rng.choice((4, 12, 64, 700, 700))
    tokens = rng.choices(_MERGED, k=low) if rng.random() < 0.7 else [*w.digits, w.space, w.newline]
    while len(row.ids) < length - 2:
        if parts and rng.random() < 0.6:
            part = rng.choice(parts)
            row.add(part, [0.0 if i < 3 else 1.0 for i in range(len(part))], 0)
        else:
            part = [rng.choice(tokens) for _ in range(rng.randrange(6, 40))]
            parts.append(part)
            row.add(part, 0.0)
    row.ids, row.weights, row.answers = row.ids[:length], row.weights[:length], row.answers[:length]
    return row


def told(answer: Tokens) -> list[float]:
    """Weights of the tokens of an answer: its first after the space, if there is one, counts most."""
    spaced = answer[0] == writer().space
    return [1.0] * spaced + [_FIRST] + [1.0] * (len(answer) - spaced - 1)


def associations(rng: random.Random, length: int) -> Row:
    """Lines of a key and a value, a few random tokens each; then all of them in other orders, until the text is full.
    Few different tokens make keys that share parts."""
    w, row = writer(), Row()
    key_tokens = rng.choices(_MERGED, k=rng.choice((8, 32, 700)))
    value_tokens = w.digits if rng.random() < 0.4 else _MERGED
    longest_key, longest_value = rng.randrange(1, 8), rng.randrange(1, 5)
    sign, line = rng.choice(w.signs), (longest_key + longest_value) // 2 + 3
    lines: dict[tuple[int, ...], Tokens] = {}
    for _ in range(rng.randrange(3, max(5, length // (2 * line)))):
        key = tuple(rng.choices(key_tokens, k=rng.randrange((longest_key + 1) // 2, longest_key + 1)))
        lines[key] = rng.choices(value_tokens, k=rng.randrange(1, longest_value + 1))
    order, known = list(lines), False
    while len(row.ids) < length:
        rng.shuffle(order)
        for key in order:
            row.add([*key, *sign], 0.0)
            value = [*lines[key], w.newline]
            row.add(value, told(value) if known else 0.0)
        known = True
    row.ids, row.weights, row.answers = row.ids[:length], row.weights[:length], row.answers[:length]
    return row


def train_row(rng: random.Random, length: int, mix: Mix) -> Row:
    length = length if rng.random() < 0.5 else rng.randrange(length // 2, length + 1)
    while True:
        kind = rng.random()
        if kind < mix.repeats:
            return repeats(rng, length)
        if (kind := kind - mix.repeats) < mix.associations:
            return associations(rng, length)
        kind -= mix.associations
        draw = _pairs if kind < mix.pairs else _ruler if kind < mix.pairs + mix.ruler else _needles
        row = draw(rng, length, mix.context_weight)
        # A short text may leave no room for a question of that form.
        if any(row.answers):
            return row


def _pairs(rng: random.Random, length: int, weight: float) -> Row:
    # Short forms, so that a text of 256 tokens holds several needles and questions.
    form = rng.choice(writer().forms[rng.choice((0, 2, 3, 3, 3, 4, 5, 5, 5))])
    needles = None if length <= 1024 and rng.random() < 0.7 else min(length // 32, rng.randrange(4, 65))
    questions = max(1, min(length // 24, rng.choice((8, 16, MOST_QUESTIONS))))
    chat = rng.random() < 0.1
    row = document(rng, length, needles=needles, questions=questions, form=form, chat=chat, context_weight=weight)
    row.task = TASKS.index("pairs")
    return row


def _ruler(rng: random.Random, length: int, weight: float) -> Row:
    form = writer().forms[0][0 if rng.random() < 0.7 else rng.randrange(len(CALLED))]
    common = rng.random() < 0.7
    row = document(rng, length, needles=1, questions=1, form=form, digits=7, ruler=common, context_weight=weight)
    row.task = TASKS.index("ruler")
    return row


def _needles(rng: random.Random, length: int, weight: float) -> Row:
    few = rng.randrange(1, max(2, min(length // 40, 32)))
    asked = rng.randrange(1, max(2, min(few, length // 64, MOST_QUESTIONS) + 1))
    chat = rng.random() < 0.25
    row = document(rng, length, needles=few, questions=asked, chat=chat, context_weight=weight)
    row.task = TASKS.index("needle")
    return row


def batch_of(rows: list[Row], length: int, sampled: int, rng: random.Random) -> Batch:
    end = writer().end
    ids = np.full((len(rows), length + 1), end, np.int32)
    weights = np.zeros((len(rows), length), np.float32)
    answers = np.zeros((len(rows), length), np.int32)
    chosen = np.zeros((len(rows), sampled), np.int32)
    for i, row in enumerate(rows):
        n = min(len(row.ids), length + 1)
        if len(row.ids) > length + 1:
            raise ValueError(f"a row of {len(row.ids)} tokens does not fit {length + 1}")
        ids[i, :n] = row.ids
        weights[i, : n - 1] = row.weights[1:]
        answers[i, : n - 1] = row.answers[1:]
        other = answers[i] == 0
        limit = _UNASKED if other.all() else _CONTEXT * weights[i][~other].sum()
        weights[i][other] *= min(1.0, limit / max(weights[i][other].sum(), 1e-9))
        rows_of_answers = np.flatnonzero(answers[i])
        most = 3 * sampled // 4
        if len(rows_of_answers) > most:
            # Those that must tell the key first.
            shuffled = rng.sample(rows_of_answers.tolist(), len(rows_of_answers))
            rows_of_answers = np.array(sorted(shuffled, key=lambda at: -weights[i][at])[:most])
        others = rng.sample(range(n - 1), min(sampled - len(rows_of_answers), n - 1))
        picked = [*rows_of_answers.tolist(), *others]
        chosen[i] = np.resize(picked, sampled)
    return Batch(ids, weights, chosen, answers, np.array([row.task for row in rows], np.int32))


def train_batch(seed: int, index: int, size: int, length: int, sampled: int, mix: Mix) -> Batch:
    """A batch of training; the same for the same arguments, in whatever process."""
    rng = random.Random(f"{seed}/{index}")
    return batch_of([train_row(rng, length, mix) for _ in range(size)], length, sampled, rng)


def scored_row(task: str, rng: random.Random, length: int, depth: float | None = None) -> Row:
    """A held-out text with one question. depth: of its needle, 0 the first line, 1 the last; random where None."""
    w, pairs, row = writer(), min(64, length // 32), Row()
    for _ in range(20):
        if task == "ruler":
            row = document(rng, length, needles=1, questions=1, form=w.forms[0][0], digits=7, ruler=True, depth=depth)
        elif task == "needle":
            row = document(rng, length, needles=min(4, max(1, length // 128)), questions=1, digits=7, depth=depth)
        elif task == "pairs":
            form = rng.choice(w.forms[rng.choice((3, 5))])
            row = document(rng, length, needles=pairs, questions=1, form=form, digits=5, depth=depth)
        else:
            raise ValueError(f"task {task!r} is none of {', '.join(TASKS)}")
        row.task = TASKS.index(task)
        if any(row.answers):
            break
    # A text too short for the form asks nothing and is not counted.
    return row


def scored_batch(
    name: str, index: int, size: int, length: int, padded: int, sampled: int, depth: float | None
) -> Batch:
    """Texts of another random state than any training, TASKS in turn, in rows of `padded` tokens."""
    rng = random.Random(f"held out/{name}/{index}")
    rows = [scored_row(TASKS[i % len(TASKS)], rng, length, depth) for i in range(size)]
    return batch_of(rows, padded, sampled, rng)
