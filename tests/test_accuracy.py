"""scripts/accuracy: its statistics and questions, and, on the embedded models, its short form."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.lib.accuracy.gates import Asked, Compared, compare
from scripts.lib.accuracy.questions import Question, recall_questions, sight_questions
from scripts.lib.accuracy.run import main
from scripts.lib.accuracy.statistics import mcnemar, paired_interval, wilson
from scripts.lib.miniature.recall_tokenizer import tokenizer_files
from scripts.lib.miniature.sight.miniature import Sight
from serving.cli import DIGITS_FOLDER, EMBEDDED

ROOT = Path(__file__).parent.parent
ABSENT = [name for name in ("sight", "recall") if not (EMBEDDED[name] / "model.safetensors").is_file()]


@pytest.mark.parametrize(
    ("lost", "gained", "p"), [(0, 0, 1.0), (3, 3, 1.0), (0, 8, 2 / 256), (8, 0, 2 / 256), (1, 5, 14 / 64)]
)
def test_the_exact_test_of_what_changed_sides(lost, gained, p):
    assert mcnemar(lost, gained) == pytest.approx(p)


def test_wilsons_interval_has_its_published_values():
    # 81 of 263 and 0 of 20: examples of R. G. Newcombe, Statistics in Medicine 17 (1998).
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_the_paired_interval_holds_the_difference_and_mirrors_when_the_sides_are_swapped():
    for both, lost, gained, neither in ((36, 12, 2, 0), (20, 0, 0, 4), (5, 3, 9, 7), (0, 0, 1, 0), (200, 1, 2, 37)):
        low, high = paired_interval(both, lost, gained, neither)
        mirrored = paired_interval(both, gained, lost, neither)
        difference = (gained - lost) / (both + lost + gained + neither)
        assert -1 <= low <= difference <= high <= 1
        assert mirrored == pytest.approx((-high, -low))
    assert paired_interval(200, 1, 2, 37)[1] < paired_interval(20, 1, 2, 4)[1]


def test_the_paired_interval_leaves_zero_out_where_the_test_does():
    assert mcnemar(12, 2) < 0.05
    assert paired_interval(36, 12, 2, 0)[1] < 0
    assert mcnemar(4, 2) > 0.05
    assert paired_interval(36, 4, 2, 8)[0] < 0 < paired_interval(36, 4, 2, 8)[1]


def row(before: list[str], after: list[str], **more) -> Compared:
    questions = [Question("count", "2") for _ in before]
    return compare("gate", "model", questions, Asked("a", before), Asked("b", after), **more)


def test_answers_that_change_without_a_loss_are_counted_and_pass():
    found = row(["2", "3", "4", "2"], ["2", "5", "2", "4"])
    assert (found.asked, found.right_before, found.right_after) == (4, 2, 2)
    assert (found.changed, found.lost, found.gained) == (3, 1, 1)
    assert found.problem == ""
    assert found.examples[0] == {"task": "count", "question": "", "right": "2", "before": "3", "after": "5"}
    assert found.tasks == {"count": (2, 4)}


def test_a_loss_that_chance_does_not_explain_fails():
    assert "20 right answers lost, 0 gained" in row(["2"] * 30, ["2"] * 10 + ["4"] * 20).problem
    assert row(["2"] * 30, ["2"] * 28 + ["4"] * 2).problem == ""


def test_where_answers_must_be_the_same_one_other_wrong_answer_fails():
    assert row(["2"] * 9 + ["5"], ["2"] * 9 + ["6"], equal=True).problem == "1 answers changed; none may"
    assert row(["2"] * 9 + ["5"], ["2"] * 9 + ["5"], equal=True).problem == ""


def test_a_row_whose_other_way_was_never_taken_fails():
    assert row(["2"], ["2"], fault="no row went the striped way").problem == "no row went the striped way"


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> dict[str, Path]:
    """Folders with the files of a miniature that its questions need; no weights."""
    folder = tmp_path_factory.mktemp("miniatures")
    files = {"sight": Sight("tiny").files(), "recall": {"config.json": "{}"} | tokenizer_files(4096)}
    for name, texts in files.items():
        (folder / name).mkdir()
        for file, text in texts.items():
            (folder / name / file).write_text(text, encoding="utf-8")
    return {name: folder / name for name in files}


def test_questions_about_pictures_are_the_same_for_a_seed_and_others_for_another(layouts):
    first, again, other = (sight_questions(layouts["sight"], 9, seed) for seed in (0, 0, 1))
    assert first == again
    assert not {q.images for q in first} & {q.images for q in other}
    assert all(q.answer and q.text and q.images for q in first)
    assert max(len(q.images) for q in first) > 1
    assert len({q.task for q in first}) > 2


def test_questions_about_texts_are_answered_by_them_once(layouts):
    first, again, other = (recall_questions(layouts["recall"], 9, seed, (256, 384)) for seed in (0, 0, 1))
    assert first == again
    assert not {q.ids for q in first} & {q.ids for q in other}
    from scripts.lib.miniature.recall_data import writer

    for question in first:
        text = writer().tokenizer.decode(list(question.ids))
        assert text.count(question.answer) == 1, question
        assert len(question.ids) <= 384


def test_questions_for_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="another tokenizer"):
        recall_questions(DIGITS_FOLDER, 3, 0, (256,))


def test_a_model_that_is_none_is_told_in_one_line(capsys):
    assert main(["--model", "slight=x"]) == 2
    assert main(["--tp", "two"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "error: --model slight=x: write sight=FOLDER or recall=FOLDER",
        "error: --tp two: write numbers of devices, such as 1,2",
    ]


def answered(*runs: list[str]) -> list[dict]:
    """The rows of the short form, run with each of these arguments at once; all of them passed."""
    command = [sys.executable, "-m", "scripts.lib.accuracy.run", "--short", "--json", "-"]
    # Half of the time is compiling, and programs that are optimised less are programs all the same.
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

    def run(arguments: list[str]) -> dict:
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, runs))
    assert all(one["passed"] for one in found)
    rows = [row for one in found for row in one["rows"]]
    assert [row for row in rows if row["equal"] and row["changed"]] == []
    assert all(row["right_before"] > row["asked"] / 2 for row in rows), "answers that are wrong anyway prove little"
    return rows


EMBEDDED_MODELS = pytest.mark.skipif(bool(ABSENT), reason=f"NOT RUN: not in the package: {', '.join(ABSENT)}")


@pytest.mark.multidevice
@EMBEDDED_MODELS
def test_six_questions_are_answered_the_same_with_images_together_and_with_stripes():
    images = ["--gate", "images", "--tp", "1", "--questions", "6"]
    selection = ["--gate", "selection", "--tp", "2", "--questions", "6"]
    assert [row["gate"][0] for row in answered(images, selection)] == ["1", "2"]


@pytest.mark.slow
@pytest.mark.multidevice
@EMBEDDED_MODELS
def test_the_embedded_models_answer_the_same_whichever_way_they_are_asked():
    rows = answered(
        ["--gate", "images", "--gate", "prefill", "--gate", "http"], ["--gate", "selection", "--gate", "keys"]
    )
    assert {row["gate"][0] for row in rows} == {"1", "2", "3", "4", "5"}
