"""The step loop on the sparse-attention decoder: prompts past index_topk, striped, in a cache too small for all."""

from concurrent.futures import Future

import numpy as np
import pytest

from scripts.lib.trace_scopes import read_section
from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from serving.profiling import Profiler
from serving.protocol import FinishEvent, SamplingParams, Submission, TokenEvent
from vitbatch import CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh


@pytest.fixture(scope="module")
def sparse(goldens):
    config = EngineConfig(
        tp=2, max_model_len=128, page_size=8, max_seqs=4, prefill_tokens=64, cache_tokens=256, stripe_rows=8
    )
    guard, metrics = CompileGuard(), Metrics()
    engine = load_engine(
        Checkpoint(goldens / "glm_moe_dsa"),
        make_mesh(2),
        config,
        EncoderConfig(),
        model_name="sparse",
        eos_ids=frozenset(),
        metrics=metrics,
        guard=guard,
    ).engine
    engine.start()
    yield engine, metrics
    assert engine.drain(20.0)
    guard.close()
    assert guard.after_ready == 0
    assert engine._scheduler.pages.used == 0


def submit(engine, name, prompt, tokens):
    """A future of (generated ids, last event)."""
    seen, done = [], Future()

    def on_event(event):
        if isinstance(event, TokenEvent):
            seen.append(event.token_id)
        else:
            done.set_result((seen, event))

    params = SamplingParams(tokens, temperature=1.0, seed=5)
    engine.submit(Submission(name, prompt, (), params), on_event)
    return done


def test_long_prompts_together_answer_as_alone_striped_and_preempted(sparse):
    engine, metrics = sparse
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 256, length).tolist() for length in (71, 33, 58, 17, 80, 44)]
    alone = [submit(engine, f"a{i}", p, 24).result(60)[0] for i, p in enumerate(prompts)]
    assert engine._scheduler.preemptions == 0
    futures = [submit(engine, f"b{i}", p, 24) for i, p in enumerate(prompts)]
    results = [f.result(60) for f in futures]
    assert [seen for seen, _ in results] == alone
    assert all(isinstance(event, FinishEvent) and event.reason == "length" for _, event in results)
    assert engine._scheduler.preemptions > 0
    text = metrics.render().decode()
    striped = float(text.split('indexer_rows_total{path="striped"} ')[1].split()[0])
    assert striped > sum(map(len, prompts)), "most prefill rows go the striped way"


def test_a_prompt_within_topk_needs_no_stripes(sparse):
    engine, metrics = sparse
    count = 'indexer_rows_total{path="replicated"} '
    before = float(metrics.render().decode().split(count)[1].split()[0])
    assert len(submit(engine, "short", list(range(40, 52)), 3).result(60)[0]) == 3
    assert float(metrics.render().decode().split(count)[1].split()[0]) == before + 12


def test_a_trace_of_real_traffic_has_the_scopes_of_profile_step(sparse, tmp_path):
    engine, _ = sparse
    profiler = Profiler(tmp_path, quietly=engine.between_steps)
    profiler.start()
    # Past index_topk and long enough for the striped program, then a few tokens.
    submit(engine, "traced", np.random.default_rng(3).integers(0, 256, 90).tolist(), 5).result(60)
    profiler.stop()
    profiler.close()
    section = read_section(tmp_path, "traffic", list(engine._runner.programs.values()), annotation="plan")
    assert section.host.keys() == {"plan", "collect"}
    assert {"splice", "project", "score", "select", "merge", "attend", "sample"} <= section.scopes.keys()
