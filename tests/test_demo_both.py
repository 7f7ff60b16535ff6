"""scripts/demo --model: what it says of a burst, right or wrong, and the checkpoints that are made up for it."""

import io
from dataclasses import replace

import jax.numpy as jnp
import pytest
from rich.console import Console

from scripts.lib.demo_both import Answer, Sizes, judge, unfit
from scripts.lib.made_up_checkpoint import write_checkpoint
from serving.models import bind_decoder
from tests.helpers import GOLDENS
from vitstripe.checkpoint import Checkpoint, raise_problems

SIZES = Sizes(images=2, prompts=1, prompt_tokens=90)
ANSWER = Answer(seconds=1.0, prompt_tokens=97, tokens=[("a", [-0.1, -2.0]), ("b", [-0.7, -0.70005])])
COUNTS = {
    "vit_calls_total": 1.0,
    "vit_lanes_filled_sum": 2.0,
    'indexer_rows_total{path="striped"}': 90.0,
    'indexer_rows_total{path="replicated"}': 7.0,
    'compiles_total{stage="after_ready"}': 0.0,
}


def judged(together=(), counts=()):
    """(what is wrong, what is printed) of a burst that is right but for some answers and counts."""
    said = io.StringIO()
    given = [*together, *[ANSWER] * (3 - len(together))]
    return judge(Console(file=said, width=150), 2, SIZES, given, [ANSWER] * 3, COUNTS | dict(counts)), said.getvalue()


def test_a_burst_that_is_right_has_its_facts_told():
    problems, said = judged()
    assert problems == []
    for fact in ("97 tokens and more", "1 for 2 images, 2.00 of 2 lanes", "90 of 97", "3 of 3, 0 more part at a tie"):
        assert fact in said


def test_an_answer_may_part_from_its_own_at_a_tie_and_nowhere_else():
    tie = replace(ANSWER, tokens=[ANSWER.tokens[0], ("c", [-0.7, -0.7])])
    other = replace(ANSWER, tokens=[("c", [-0.1, -2.0]), ANSWER.tokens[1]])
    problems, said = judged([tie])
    assert problems == []
    assert "2 of 3, 1 more part at a tie" in said
    assert judged([other])[0] == ["token 0 is 'c', alone it is 'a'"]
    assert judged([replace(ANSWER, tokens=ANSWER.tokens[:1])])[0] == ["another number of tokens"]


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({"vit_calls_total": 2.0, "vit_lanes_filled_sum": 4.0}, "nothing was batched across requests"),
        ({"vit_lanes_filled_sum": 1.0}, "more than one of 2 lanes"),
        ({'indexer_rows_total{path="striped"}': 0.0}, "none of 7 indexer rows went the striped way"),
        ({'compiles_total{stage="after_ready"}': 3.0}, "3 programs were compiled after ready"),
    ],
)
def test_what_did_not_happen_is_a_problem(counts, problem):
    [said] = judged(counts=counts)[0]
    assert problem in said


def test_a_model_without_an_indexer_is_told_so_and_is_no_problem():
    problems, said = judged(counts={f'indexer_rows_total{{path="{path}"}}': 0.0 for path in ("striped", "replicated")})
    assert problems == []
    assert "none: this model has no indexer" in said


def test_a_folder_that_is_no_model_with_a_tower_is_told_before_anything_starts(tmp_path):
    assert "is no checkpoint" in unfit(tmp_path)
    assert "has no vision tower" in unfit(GOLDENS / "glm_moe_dsa")
    assert unfit(GOLDENS / "glm5_next") == ""


@pytest.mark.parametrize("shape", ["tiny-glm5", "tiny-qwen35"])
def test_a_made_up_checkpoint_fits_its_config(tmp_path, shape):
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "new" / "folder", shape))
    binding = bind_decoder(checkpoint, tp=2, dtype=jnp.float32)
    raise_problems(checkpoint, [binding])
    text = checkpoint.config["text_config"]
    assert text["max_position_embeddings"] >= 8192 + 256, "prompts of the default length do not fit"
    if shape == "tiny-glm5":
        assert text["index_topk"] // text["index_kpool"] == 512
