"""The plan's arithmetic against counts by hand, and its predictions against what upstream published."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from dsa_indexer import StripeConfig
from dsa_indexer.plan import GLM_5_2, MI355X, PRESETS, Rates, Work, chunked, plan, plan_pass

SCRIPT = Path(__file__).parents[2] / "scripts" / "lib" / "plan_striping.py"
GLM = Work.from_hf(GLM_5_2)
UPSTREAM = StripeConfig(rows=512)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plan_striping", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_prompt_of_50000_tokens_gains_what_upstreams_throughput_implies_within_a_factor_of_two():
    # 8 devices, passes of 32768 rows: their throughput rose as if a prompt took 0.197 s less.
    gain = plan([50000], GLM, MI355X, tp=8, stripes=UPSTREAM).gain_prompt
    assert 0.197 / 2 < gain < 0.197 * 2


def test_a_prompt_of_8192_tokens_changes_the_time_to_the_first_token_by_less_than_a_percent():
    # The floor is below any real time to the first token, so the share of the real one is smaller still.
    assert abs(plan([8192], GLM, MI355X, tp=8, stripes=UPSTREAM).share) < 0.01


def test_a_pass_is_counted_exactly():
    work = Work(heads=3, dim=5, topk=7, indexer_layers=2, q_rank=11, active_params=100, attention_flops=10)
    rates = Rates(score_flops=30.0, select_bytes=4.0, link_bytes=14.0, dense_flops=330.0)
    lengths = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9])
    found = plan_pass(lengths, work, rates, tp=2, stripes=StripeConfig(rows=2))
    # Stripes 1+2 | 3+4 | 5+6 | 7+8 | 9, dealt in turn: 1 2 5 6 9 and 3 4 7 8.
    assert (found.rows, found.pairs, found.busiest) == (9, 45, 23)
    assert found.balance == pytest.approx(23 / 22.5)
    assert found.merge_bytes == 2 * 9 * 7 * 4 // 2
    pair_seconds = 1.0 + 1.0
    assert found.replicated == pytest.approx(45 * pair_seconds)
    assert found.striped == pytest.approx(23 * pair_seconds + 252 / 14)
    assert found.gain == pytest.approx(44 - 18)
    assert found.saved_projection == pytest.approx(2 * 9 * 11 * 15 / 2 / 330)


def test_at_the_break_even_nothing_is_gained():
    lengths = np.full(4096, 3000)
    stripes = StripeConfig(rows=64, merge="all_gather")
    found = plan_pass(lengths, GLM, MI355X, tp=4, stripes=stripes)
    at = plan_pass(np.full(4096, round(found.break_even)), GLM, MI355X, tp=4, stripes=stripes)
    assert abs(at.gain) < 1e-3 * at.replicated


def test_an_all_gather_moves_half_of_what_an_all_reduce_does():
    lengths = np.arange(1, 1001)
    moved = [plan_pass(lengths, GLM, MI355X, tp=8, stripes=StripeConfig(merge=m)) for m in ("pmax", "all_gather")]
    assert moved[0].merge_bytes == 2 * moved[1].merge_bytes == 2 * 1000 * 8192 * 7 // 8
    assert moved[0].break_even == pytest.approx(2 * moved[1].break_even)


def test_prompts_are_packed_into_passes():
    batches = chunked([5, 3], prefix=10, chunk=6)
    np.testing.assert_array_equal(batches[0], [11, 12, 13, 14, 15, 11])
    np.testing.assert_array_equal(batches[1], [12, 13])


def test_the_released_models_have_their_published_sizes():
    assert GLM.indexer_layers == 21
    assert 39e9 < GLM.active_params < 41e9
    deepseek = Work.from_hf(PRESETS["deepseek-v3.2"])
    assert deepseek.indexer_layers == 61
    assert 36e9 < deepseek.active_params < 38e9


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="tp is 1"):
        plan([9], GLM, MI355X, tp=1, stripes=UPSTREAM)
    with pytest.raises(ValueError, match="chunk is 0"):
        plan([9], GLM, MI355X, tp=2, chunk=0, stripes=UPSTREAM)
    with pytest.raises(ValueError, match=r"Rates.link_bytes is 0"):
        Rates(1.0, 1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="index_topk = None"):
        Work.from_hf({**GLM_5_2, "index_topk": None})
    with pytest.raises(ValueError, match="index_kpool = 4"):
        Work.from_hf({**GLM_5_2, "index_kpool": 4})


def test_the_script_prints_what_is_arithmetic_and_what_is_assumed_and_writes_the_numbers(script, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"text_config": dict(GLM_5_2)}))
    arguments = ["--model", str(tmp_path), "--prompts", "4096", "50000", "--json", str(tmp_path / "plan.json")]
    assert script.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "arithmetic:" in printed
    assert "assumed:" in printed
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert [[p["rows"] for p in found["passes"]] for found in numbers.values()] == [[4096], [32768, 17232]]


def test_the_script_names_a_model_it_cannot_read(script, capsys):
    assert script.main(["--model", "nowhere"]) == 1
    assert "nowhere is no preset (glm-5.2, deepseek-v3.2)" in capsys.readouterr().err


def test_without_matplotlib_the_script_names_the_extra(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert script.main(["--plot", str(tmp_path / "gain.png")]) == 1
    assert "pip install '.[plots]'" in capsys.readouterr().err


def test_the_plot_is_a_picture(script, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    assert script.main(["--plot", str(tmp_path / "gain.png")]) == 0
    assert (tmp_path / "gain.png").read_bytes().startswith(b"\x89PNG")
