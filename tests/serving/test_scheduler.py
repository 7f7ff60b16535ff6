"""Who is computed next, and what requests share: host planning without devices."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from serving.config import ROW_TILE, STATE_CHUNK, EngineConfig
from serving.positions import mrope_positions
from serving.prefix import extend_keys
from serving.protocol import ImageSpan, SamplingParams, Submission
from serving.runner import cache_pages
from serving.scheduler import Scheduler
from serving.sequence import NO_SEAT, Sequence

CONFIG = EngineConfig(max_model_len=120, page_size=8, max_seqs=3, prefill_tokens=48)


def image(key, grid=(1, 4, 6)):
    tokens = grid[0] * grid[1] * grid[2] // 4
    return SimpleNamespace(key=key, num_tokens=tokens, grid_thw=grid, patches=np.zeros((4, 4), np.uint8))


def sequence(order, ids, *, images=(), salt="", **params):
    """A request for the tokens `ids`, or for that many tokens of its own."""
    ids = [order * 1000 + i for i in range(1, ids + 1)] if isinstance(ids, int) else list(ids)
    spans = tuple(ImageSpan(start, one) for start, one in images)
    positions, delta = mrope_positions(len(ids), [(s.start, s.image.grid_thw) for s in spans], 2)
    submission = Submission(str(order), ids, spans, SamplingParams(**{"max_tokens": 9} | params), salt)
    return Sequence(submission, lambda event: None, positions, delta, 0, order=order)


def scheduler_of(*seqs, pages=100, config=CONFIG, **limits):
    scheduler = Scheduler(config, pages, **limits)
    for seq in seqs:
        scheduler.add(seq)
    scheduler.admit()
    return scheduler


def compute(scheduler, chunks):
    """What the engine does once the pass of these chunks is over."""
    for chunk in chunks:
        seq = chunk.seq
        seq.computed = chunk.stop
        scheduler.publish(seq, chunk.stop)
        if chunk.finishes_prompt:
            seq.in_prefill = False
            seq.tokens.append(7)


def planned(chunks):
    return [(c.seq.order, c.start, c.stop) for c in chunks]


# -- the order of requests


def test_half_of_a_pass_is_the_oldest_prompts_and_half_the_shortest_ones():
    scheduler = scheduler_of(sequence(0, 100), sequence(1, 60), sequence(2, 5))
    chunks = scheduler.prefill()
    # half of 48 rows, in whole tiles, is 32; the shortest takes the tile that is left
    assert planned(chunks) == [(0, 0, 32), (2, 0, 5)]
    assert sum(c.rows for c in chunks) <= CONFIG.prefill_tokens
    assert all(c.rows % ROW_TILE == 0 for c in chunks)
    assert [c.finishes_prompt for c in chunks] == [False, True]


def test_what_the_short_ones_leave_over_is_the_oldest_prompts():
    config = EngineConfig(max_model_len=400, page_size=8, max_seqs=3, prefill_tokens=128)
    scheduler = scheduler_of(sequence(0, 300), sequence(1, 5), config=config)
    assert planned(scheduler.prefill()) == [(0, 0, 112), (1, 0, 5)]


def test_a_lone_prompt_takes_the_whole_pass():
    scheduler = scheduler_of(sequence(0, 100))
    assert planned(scheduler.prefill()) == [(0, 0, 48)]


def test_neither_a_long_prompt_nor_a_stream_of_short_ones_starves_the_other():
    long = sequence(0, 110)
    scheduler = scheduler_of(long)
    over = []
    for order in range(1, 30):
        scheduler.add(sequence(order, 40))
        scheduler.admit()
        chunks = scheduler.prefill()
        done = [c.seq for c in chunks if c.finishes_prompt]
        compute(scheduler, chunks)
        for seq in done:
            scheduler.remove(seq)
        over.append([seq.order for seq in done])
        if long in done:
            break
    assert len(over) == -(-110 // 32), "the long prompt moves on by half of every pass"
    assert over[2] == [1], "a short one does not wait for the end of the long one"


def test_the_key_gather_bounds_what_shares_a_pass():
    scheduler = scheduler_of(*(sequence(i, n) for i, n in enumerate((16, 17, 3))), gather_pages=4)
    # 2 pages, then 1, then 3 would be over 4
    assert planned(scheduler.prefill()) == [(0, 0, 16), (2, 0, 3)]


def test_nobody_overtakes_a_request_that_waits_for_pages():
    scheduler = scheduler_of(sequence(0, 24), sequence(1, 80), sequence(2, 8), pages=8)
    assert [s.order for s in scheduler.running] == [0]
    assert [s.order for s in scheduler.waiting] == [1, 2]
    scheduler.check()


def test_the_youngest_gives_way_when_pages_run_out_and_comes_back_first():
    old, young, late = sequence(0, 16), sequence(1, 15), sequence(2, 8)
    scheduler = scheduler_of(old, young, late, pages=4)
    assert [s.order for s in scheduler.running] == [0, 1]
    compute(scheduler, scheduler.prefill())
    assert scheduler.decode(may_preempt=False) is None
    scheduler.check()
    due, preempted = scheduler.decode()
    assert ([s.order for s in due], [s.order for s in preempted]) == ([0], [1])
    assert scheduler.preemptions == 1
    assert [s.order for s in scheduler.waiting] == [1, 2]
    assert (young.pages, young.computed, len(young.tokens), young.seat) == ([], 0, 16, NO_SEAT)
    scheduler.check()
    scheduler.remove(old)
    scheduler.admit()
    assert [s.order for s in scheduler.running] == [1, 2]
    for seq in (young, late):
        scheduler.remove(seq)
    scheduler.check()
    assert scheduler.pages.used == 0


def test_an_answer_that_has_all_its_tokens_on_the_way_is_due_no_more():
    seq = sequence(0, 8, max_tokens=2)
    scheduler = scheduler_of(seq)
    compute(scheduler, scheduler.prefill())
    assert scheduler.decode()[0] == [seq]
    seq.computed, seq.pending = seq.length, 1
    assert scheduler.decode()[0] == []


def test_a_leaked_seat_or_page_fails_the_check():
    scheduler = scheduler_of(sequence(0, 20))
    scheduler.check()
    scheduler.running[0].add_pages([50])
    with pytest.raises(RuntimeError, match="page 50"):
        scheduler.check()
    scheduler.running[0].seat = 1
    with pytest.raises(RuntimeError, match="seats"):
        scheduler.check()


# -- prefixes


def test_a_request_finds_the_full_pages_it_has_in_common_but_computes_its_last_token():
    common = list(range(24))
    scheduler = scheduler_of(first := sequence(0, [*common, 91]))
    compute(scheduler, scheduler.prefill())
    same, longer, other = sequence(1, common), sequence(2, [*common[:17], 5, 6]), sequence(3, [8, *common[1:]])
    scheduler.remove(first)
    for seq in (same, longer, other):
        scheduler.add(seq)
    scheduler.admit()
    assert [s.cached for s in (same, longer, other)] == [16, 16, 0]
    assert same.pages[:2] == longer.pages[:2]
    assert planned(scheduler.prefill()) == [(1, 16, 24), (2, 16, 19), (3, 0, 16)]
    scheduler.check()


def test_a_page_is_computed_once_whoever_else_wants_it():
    prompt = list(range(40))
    seqs = [sequence(i, [*prompt, 50 + i]) for i in range(3)]
    scheduler = scheduler_of(*seqs)
    flying = scheduler.prefill()
    assert planned(flying) == [(0, 0, 41)]
    seqs[0].computed, seqs[0].in_prefill = 41, False
    assert scheduler.prefill(flying) == [], "the others wait while the pages are on their way"
    scheduler.publish(seqs[0], 41)
    assert planned(scheduler.prefill()) == [(1, 40, 41), (2, 40, 41)]
    assert [s.cached for s in seqs] == [0, 40, 40]
    assert seqs[1].pages[:5] == seqs[0].pages[:5]
    scheduler.check()


def test_when_the_one_that_computes_a_prefix_is_gone_the_next_one_does():
    prompt = list(range(40))
    first, second = sequence(0, [*prompt, 50]), sequence(1, [*prompt, 51])
    scheduler = scheduler_of(first, second)
    flying = scheduler.prefill()
    scheduler.remove(first)
    assert scheduler.prefill(flying) == [], "for one step: nobody knows here that it is gone"
    assert planned(scheduler.prefill()) == [(1, 0, 41)]
    scheduler.check()


def test_a_preempted_request_finds_what_it_had_computed():
    old, young = sequence(0, 16), sequence(1, 15)
    scheduler = scheduler_of(old, young, pages=4)
    compute(scheduler, scheduler.prefill())
    scheduler.decode()
    assert young.seat == NO_SEAT
    scheduler.remove(old)
    scheduler.admit()
    assert (young.computed, young.cached) == (8, 0), "found again, but not what clients call cached"


def test_without_the_cache_nothing_is_shared():
    config = EngineConfig(max_model_len=120, page_size=8, max_seqs=3, prefill_tokens=48, prefix_cache=False)
    scheduler = scheduler_of(sequence(0, range(24)), config=config)
    compute(scheduler, scheduler.prefill())
    scheduler.add(again := sequence(1, range(24)))
    scheduler.admit()
    assert again.cached == again.computed == 0
    scheduler.remove(again)
    assert scheduler.pages.kept == 0


def test_a_request_for_the_prompts_log_probabilities_computes_its_whole_prompt():
    scheduler = scheduler_of(sequence(0, range(24)))
    compute(scheduler, scheduler.prefill())
    scheduler.add(again := sequence(1, range(24), prompt_logprobs=0))
    scheduler.admit()
    assert again.computed == 0


PLACEHOLDERS = [1, 2, 3, *[261] * 6, 4, 5, 6, 7, 8, 9, 10]


def keys(**changes):
    """Keys of the two pages of a prompt with an image of six tokens that lies in both."""
    fields = {"ids": PLACEHOLDERS, "images": [(3, image(b"cat"))], "salt": ""} | changes
    return extend_keys(sequence(0, fields["ids"], images=fields["images"], salt=fields["salt"]), 8)


def test_equal_prompts_have_equal_keys():
    assert keys() == keys()
    assert len(keys()) == 2


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"images": [(3, image(b"dog"))]}, [True, True]),
        ({"images": []}, [True, True]),
        ({"images": [(3, image(b"cat", (1, 6, 4)))]}, [True, True]),
        ({"images": [(2, image(b"cat"))]}, [True, True]),
        ({"salt": "tenant"}, [True, True]),
        ({"ids": [*PLACEHOLDERS[:15], 11]}, [False, True]),
        ({"ids": [9, *PLACEHOLDERS[1:]]}, [True, True]),
    ],
    ids=["another image", "no image", "another grid", "moved", "salted", "later token", "first token"],
)
def test_what_changes_a_pages_rows_changes_its_key_and_those_after_it(changes, differ):
    assert [a != b for a, b in zip(keys(), keys(**changes), strict=True)] == differ


def test_an_image_before_a_page_changes_the_key_of_the_page():
    late = [*PLACEHOLDERS, *range(20, 28)]
    one, other = (sequence(0, late, images=[(3, image(key))]) for key in (b"cat", b"dog"))
    assert extend_keys(one, 8)[2] != extend_keys(other, 8)[2]


def test_image_keys_do_not_run_together():
    ids = [261] * 12 + [1, 2, 3, 4]
    small = (1, 2, 4)
    one = sequence(0, ids, images=[(0, image(b"ab", small)), (2, image(b"c", small))])
    other = sequence(0, ids, images=[(0, image(b"a", small)), (2, image(b"bc", small))])
    assert extend_keys(one, 8) != extend_keys(other, 8)


def test_a_generated_page_has_the_key_of_the_prompt_that_repeats_it():
    seq = sequence(0, PLACEHOLDERS, images=[(3, image(b"cat"))])
    seq.tokens += range(30, 38)
    again = sequence(1, [*PLACEHOLDERS, *range(30, 38)], images=[(3, image(b"cat"))])
    assert extend_keys(seq, 8) == extend_keys(again, 8)


def test_the_planning_benchmark_runs():
    script = Path(__file__).parents[2] / "scripts" / "lib" / "bench_scheduler.py"
    flags = ["--requests", "5", "--steps", "3", "--context", "512", "--page-size", "16", "--json"]
    run = [sys.executable, str(script), *flags]
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["milliseconds"]) == {"decode", "decode and prefill"}
    assert all(part["median"] > 0 for parts in report["milliseconds"].values() for part in parts.values())


# -- decoders that keep a state a request

STATEFUL = EngineConfig(max_model_len=1200, page_size=8, max_seqs=3, prefill_tokens=400)


def stateful(*seqs, pages=500, **fields):
    config = replace(STATEFUL, **fields)
    return scheduler_of(*seqs, pages=pages, config=config, align=STATE_CHUNK, keeps_state=True)


def test_requests_that_keep_a_state_start_at_whole_chunks_of_rows():
    """400 rows hold six chunks of 64; half of the pass, in whole chunks, belongs to the oldest prompt."""
    scheduler = stateful(sequence(0, 900), sequence(1, 70), sequence(2, 9))
    chunks = scheduler.prefill()
    assert planned(chunks) == [(0, 0, 256), (2, 0, 9), (1, 0, 64)]
    assert [c.rows for c in chunks] == [256, 64, 64]
    compute(scheduler, chunks)
    # Alone, it goes on by whole chunks, so that a token is in the same chunk whatever rides along.
    scheduler.remove(chunks[1].seq)
    scheduler.remove(chunks[2].seq)
    assert planned(scheduler.prefill()) == [(0, 256, 640)]


@pytest.mark.parametrize("prefill_tokens", [64, 112, 192, 400])
def test_an_image_longer_than_a_pass_goes_on_in_every_pass(prefill_tokens):
    """Beside another long prompt and one that comes later with less to compute; a pass of one chunk is all its."""
    seq = sequence(0, [1, *[261] * 900, 2], images=[(1, image(b"wide", (1, 60, 60)))])
    scheduler, done = stateful(seq, sequence(1, 900), prefill_tokens=prefill_tokens), 0
    for step in range(15):
        if step == 3:
            scheduler.add(sequence(2, 170))
            scheduler.admit()
        chunks = scheduler.prefill()
        compute(scheduler, chunks)
        assert not seq.in_prefill or seq.computed >= done + STATE_CHUNK
        done = seq.computed
    assert not seq.in_prefill


def test_pages_without_the_state_that_belongs_to_them_are_not_shared():
    first, again = sequence(0, range(1, 50)), sequence(1, range(1, 50))
    scheduler = stateful(first)
    compute(scheduler, scheduler.prefill())
    scheduler.add(again)
    scheduler.admit()
    assert planned(scheduler.prefill()) == [(1, 0, 49)], "nothing was found, and nobody waited for another one's page"
    assert (scheduler.pages.kept, again.cached) == (0, 0)
    scheduler.remove(first)
    assert scheduler.pages.kept == 0


def test_a_pass_too_small_for_one_chunk_is_refused():
    with pytest.raises(ValueError, match="prefill_tokens is 48; this model needs at least 64"):
        scheduler_of(align=STATE_CHUNK, keeps_state=True)


# -- memory


def test_pages_are_what_the_states_of_all_requests_leave():
    """80 % of the free memory, 8000 of 10000 bytes."""
    config = EngineConfig(max_model_len=80, page_size=8, max_seqs=4)
    assert cache_pages(config, 300, 10000) == 8000 // 300
    assert cache_pages(config, 300, 10000, bytes_per_seat=500) == (8000 - 4 * 500) // 300
    assert cache_pages(config, 30, 10000, bytes_per_seat=500) == 4 * 10, "every seat at full length"
    for seat in (1300, 3000):
        with pytest.raises(
            ValueError, match=r"beside 0.0 GiB of states of 4 requests.* lower max_model_len or max_seqs"
        ):
            cache_pages(config, 300, 10000, bytes_per_seat=seat)
    with pytest.raises(
        ValueError, match="holds 8 cache tokens, less than max_model_len 80; lower max_model_len or raise"
    ):
        cache_pages(config, 5000, 10000)
