"""What Sight is shown and asked: one right answer a question, the same batch a job, answers that tokens spell."""

from string import ascii_lowercase, ascii_uppercase

import numpy as np
import pytest
from PIL import Image

from scripts.lib.miniature.sight import scenes
from scripts.lib.miniature.sight.composing import Composer
from scripts.lib.miniature.sight.drawing import Thing
from scripts.lib.miniature.sight.layout import Layout
from scripts.lib.miniature.sight.miniature import make
from scripts.lib.miniature.sight.packing import Packer, Row
from scripts.lib.miniature.sight.scenes import (
    Level,
    Question,
    Scene,
    ask_things,
    draw_things,
    draw_words,
    place_of,
    referents,
)
from scripts.lib.miniature.sight.words import COLOURS, HELD_OUT_WORDS, PLACES, SHAPES, TASKS, WORDS
from scripts.lib.miniature.spec import Job


@pytest.fixture(scope="module")
def sight():
    return make("tiny")


def scene(*things: Thing) -> Scene:
    return Scene(Image.new("RGB", (90, 60)), list(things))


def answers(task: str, shown: Scene) -> set[tuple[str, str]]:
    asked = [ask_things(np.random.default_rng(i), shown, task) for i in range(80)]
    return {(q.text.lower().rstrip("?"), q.answer) for q in asked if q}


def test_a_job_gives_the_same_batch_each_time_and_another_job_another(sight):
    first, again, other = (sight.draw(Job(3, index, 0.5)) for index in (11, 11, 12))
    assert sight.program(Job(3, 11, 0.5)) == sight.program(Job(3, 12, 0.5)) == "small"
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)
    assert not np.array_equal(first["pixels"], other["pixels"])


@pytest.mark.parametrize("suite", [None, "held-out", "crowd"])
@pytest.mark.parametrize("index", [0, 1])
def test_batches_have_the_shapes_that_programs_are_compiled_for(sight, suite, index):
    job = Job(0, index, 1.0, suite)
    batch, shapes = sight.draw(job), sight.shapes(sight.program(job))
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    assert (batch["task"] >= 0).any(1).all(), "a row without a question"
    assert (batch["rows"] >= 0).sum() * 4 == batch["count"].sum(), "a token for each four patches"


def test_things_are_named_only_by_what_no_other_thing_shares():
    a, b, c = Thing("star", "red", 20, 20, 9), Thing("star", "blue", 50, 20, 9), Thing("ring", "red", 70, 40, 9)
    assert referents([a, b, c]) == {
        "red star": a,
        "blue star": b,
        "blue object": b,
        "ring": c,
        "red ring": c,
    }
    assert referents([a])["object"] is a


def test_answers_are_what_was_drawn():
    a, b, c = Thing("star", "red", 15, 10, 9), Thing("star", "blue", 45, 50, 9), Thing("ring", "red", 80, 30, 9)
    shown = scene(a, b, c)
    assert {answer for _, answer in answers("colour", shown)} == {"red"}
    assert {answer for _, answer in answers("shape", shown)} == {"star"}
    assert ("how many stars are there", "2") in answers("count", shown)
    assert ("how many objects are there", "3") in answers("count", shown)
    assert ("where is the ring", "right") in answers("where", shown)
    assert ("is the ring left of the blue object", "no") in answers("side", shown)
    assert ("is the red star above the ring", "yes") in answers("side", shown)


@pytest.mark.parametrize(("x", "y", "place"), [(0.1, 0.1, "top left"), (0.5, 0.5, "middle"), (0.9, 0.5, "right")])
def test_places_are_thirds_of_the_picture(x, y, place):
    assert place_of(300 * x, 100 * y, 300, 100) == place
    assert place_of(300 * 0.33, 100 * y, 300, 100) is None, "on the border of two"


def test_shapes_do_not_touch_and_keep_inside_and_stand_out():
    rng = np.random.default_rng(4)
    for _ in range(60):
        width, height = (int(side) for side in rng.integers(56, 180, 2))
        shown = draw_things(rng, width, height, Level())
        for i, a in enumerate(shown.things):
            assert a.radius - 1 <= a.x <= width - a.radius + 1
            assert a.radius - 1 <= a.y <= height - a.radius + 1
            for b in shown.things[:i]:
                assert (a.x - b.x) ** 2 + (a.y - b.y) ** 2 > (a.radius + b.radius) ** 2
            # Its own colour where it is: at the middle, or on the band of a ring.
            at = a.x + (0.75 * a.radius if a.shape == "ring" else 0), a.y
            pixel = np.array(shown.image.getpixel((round(at[0]), round(at[1]))), float)
            assert np.abs(pixel - COLOURS[a.colour]).max() < 80, (a, pixel)


def test_words_of_the_held_out_set_are_never_drawn_while_training():
    assert not set(WORDS) & set(HELD_OUT_WORDS)
    assert all(3 <= len(word) <= 6 and word.isalpha() for word in (*WORDS, *HELD_OUT_WORDS))
    rng = np.random.default_rng(0)
    drawn = {draw_words(rng, 120, 90, Level(), 1.0).text for _ in range(120)}
    known = drawn & {word.upper() for word in (*WORDS, *HELD_OUT_WORDS)}
    assert known
    assert known <= {word.upper() for word in WORDS}


def test_every_letter_is_drawn_beside_others_in_texts_that_are_no_words(monkeypatch):
    """Where only words have a letter, the words are learnt by heart and the letter is not."""
    drawn: list[str] = []
    monkeypatch.setattr(scenes, "draw_text", lambda image, text, *rest: drawn.append(text))
    rng = np.random.default_rng(0)
    for _ in range(600):
        draw_words(rng, 120, 90, Level(), 1.0)
    known = {word.upper() for word in WORDS}
    made_up = [text for text in drawn if text.isalpha() and len(text) > 2 and text.upper() not in known]
    assert len(made_up) > 200
    for alphabet in (ascii_uppercase, ascii_lowercase):
        assert set("".join(text for text in made_up if text[0] in alphabet)) == set(alphabet)
    assert not any(set(text) <= set("OI") for text in drawn), "would be 0 and 1 as well"
    assert not any(set(text) <= set("osvwxzcl") and "l" in text for text in made_up), "the l would be I as well"


def test_texts_and_crowds_grow_with_the_training(sight):
    layout = sight._layouts["small"]
    levels = [Composer(layout, sight._plan, Job(0, 0, progress))._level for progress in (0.0, 0.1, 0.3)]
    assert [level.letters for level in levels] == [1, 3, 6]
    assert [level.things for level in levels] == [1, 4, 6]


def test_every_answer_is_spelled_back_by_its_tokens(sight):
    tokens = sight._tokens
    places = [place for row in PLACES for place in row]
    for answer in (*COLOURS, *SHAPES, *places, "6", "yes", *(word.upper() for word in HELD_OUT_WORDS)):
        assert tokens._tokenizer.decode(tokens.plain(answer), skip_special_tokens=False) == answer
    # Text is one token a letter, words of a question are one each.
    assert len(tokens.plain("ANCHOR")) == 6
    assert len(tokens.plain("What colour is the star?")) == 6


def test_a_question_that_has_no_room_is_left_out(sight):
    layout = Layout(1, 1, 192, 60, questions=3)
    packer = Packer(layout, sight._plan, sight._tokens)
    asked = [Question("colour", f"What colour is the {shape}?", "red") for shape in SHAPES[:3]]
    packer.add(Row([Image.new("RGB", (64, 64))], asked, [TASKS.index("colour")] * 3))
    assert packer.batch["task"][0].tolist() == [0, -1, -1]
