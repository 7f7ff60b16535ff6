"""What the compiled striped program holds: its collective, and scores of its own rows only."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsa_indexer import engages, striped_topk_rows, topk_rows
from tests.dsa_indexer.batches import K, mixed_batch, striping

pytestmark = pytest.mark.multidevice

MERGES = ("pmax", "all_gather")
COLUMNS = 512  # one key block holds all keys of the batch


def _striped(mesh, S: int, merge: str):
    return jax.jit(lambda *args: striped_topk_rows(*args, k=K, mesh=mesh, stripes=striping(S, merge)))


def _stated(text: str) -> list[str]:
    """Collectives of a lowered program."""
    return re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)\b", text)


def _compiled(text: str) -> list[str]:
    """Collectives of a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    return re.findall(rf"= \S+ ({kinds})(?:-start)?\(", text)


def test_the_pmax_merge_lowers_to_one_all_reduce_of_a_maximum(mesh_of):
    text = _striped(mesh_of(8), 4, "pmax").lower(*mixed_batch(200)).as_text()
    assert _stated(text) == ["all_reduce"]
    body = text[text.index("stablehlo.all_reduce") :]
    assert "stablehlo.maximum" in body[: body.index("}) :")]


def test_the_all_gather_merge_lowers_to_one_all_gather(mesh_of):
    text = _striped(mesh_of(8), 4, "all_gather").lower(*mixed_batch(200)).as_text()
    assert _stated(text) == ["all_gather"]


@pytest.mark.parametrize("merge", MERGES)
def test_the_compiled_program_keeps_the_one_collective_and_scores_its_share_of_the_rows(merge, mesh_of):
    M, tp = 512, 8
    text = _striped(mesh_of(tp), 8, merge).lower(*mixed_batch(M)).compile().as_text()
    assert _compiled(text) == ["all-reduce" if merge == "pmax" else "all-gather"]
    if merge == "pmax":
        (computation,) = re.findall(r" all-reduce(?:-start)?\(.*to_apply=(%?[\w.]+)", text)
        assert " maximum(" in re.split(rf"\n{re.escape(computation)} ", text)[1].split("\n}")[0]
    shapes = (tuple(map(int, dims.split(","))) for dims in re.findall(rf"f32\[((?:\d+,)+{COLUMNS})\]", text))
    # Per-head products of a row tile have the same last axis; they are [8 rows, heads, columns].
    scored = {int(np.prod(dims[:-1])) for dims in shapes if dims[-2] == 8 or len(dims) == 2}
    assert max(scored) == M // tp


def test_where_striping_declines_the_program_that_runs_holds_no_collective(mesh_of):
    M, tp = 7, 8
    engaged, _ = engages(M, tp, 60.0, striping(8, "pmax"))
    assert not engaged
    mesh = mesh_of(tp)
    everywhere = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(lambda *args: topk_rows(*args, k=K), in_shardings=everywhere, out_shardings=everywhere)
    compiled = program.lower(*mixed_batch(M)).compile()
    assert not _compiled(compiled.as_text())


@pytest.mark.parametrize("merge", MERGES)
def test_zero_rows_give_an_empty_selection_without_a_collective(merge, mesh_of):
    run = _striped(mesh_of(4), 8, merge)
    args = mixed_batch(0)
    assert run(*args).shape == (0, K)
    assert not _stated(run.lower(*args).as_text())


def test_a_batch_in_which_every_row_takes_all_its_keys_declines():
    engaged, reason = engages(1000, 8, 900.0, striping(64, "pmax"), most_keys=2048, k=2048)
    assert not engaged
    assert "no row has more than 2048 keys" in reason
    assert engages(1000, 8, 900.0, striping(64, "pmax"), most_keys=2049, k=2048)[0]
