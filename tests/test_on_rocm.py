"""scripts/on_rocm: its plan, how it reads what came out, and that no step can take the others along."""

import json
import subprocess
import sys

import pytest

from scripts.lib import on_rocm
from scripts.lib.on_rocm import PLAN, Outcome, Step, claims_of, command_of, main, read_tests, run_step
from scripts.lib.rocm_claims import CLAIMS, Result


def test_the_plan_is_printed_without_running_anything(capsys):
    assert main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{step.name}: {step.what}" in printed for step in PLAN)
    assert "--tp 8" in printed
    assert "{" not in printed


@pytest.mark.parametrize("step", PLAN, ids=lambda step: step.name)
def test_a_step_has_options_that_its_script_knows(step, tmp_path):
    for smoke in (False, True):
        command = command_of(step, smoke=smoke, tp=2, out=tmp_path)
        if command is None:
            continue
        if command[2] == "pytest" or command[2] == "serving":
            continue
        module = command[2].rsplit(".", 1)[-1]
        source = (on_rocm.ROOT / "scripts" / "lib" / f"{module}.py").read_text()
        shared = (on_rocm.ROOT / "scripts" / "lib" / "made_up_tower.py").read_text()
        unknown = [a for a in command[3:] if a.startswith("--") and f'"{a}"' not in source + shared]
        known = {"--no-rival", "--cosine", "--no-start-up"}
        assert [a for a in unknown if a not in known] == []


def test_a_machine_without_an_amd_gpu_is_refused_in_one_line(monkeypatch, capsys, tmp_path):
    found = {"kind": "cpu", "name": "cpu", "count": 1}
    asked = subprocess.CompletedProcess([], 0, f"{json.dumps(found)}\n", "")
    monkeypatch.setattr(on_rocm.subprocess, "run", lambda *args, **kwargs: asked)
    assert main(["--report", str(tmp_path / "report.json")]) == 2
    assert "no AMD GPU" in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()


def test_tiny_forms_on_a_cpu_measure_nothing_and_try_two_devices(monkeypatch, tmp_path):
    found = {"kind": "cpu", "name": "cpu", "count": 1}
    asked = subprocess.CompletedProcess([], 0, f"{json.dumps(found)}\n", "")
    monkeypatch.setattr(on_rocm.subprocess, "run", lambda *args, **kwargs: asked)
    ran = []

    def passes(step, command, out):
        ran.append(command)
        return Outcome(step.name, "passed", results={"speeds": [1]})

    monkeypatch.setattr(on_rocm, "run_step", passes)
    assert main(["--smoke", "--report", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["claims"] is None
    (sweep,) = (command for command in ran if "--sweep" in command)
    assert sweep[sweep.index("--tp") + 1] == "2"


def test_a_step_that_fails_or_hangs_is_told_with_the_end_of_its_output(tmp_path):
    def ran(code, minutes=1.0):
        return run_step(Step("made up", "", (), minutes=minutes), [sys.executable, "-c", code], tmp_path)

    assert ran("print('fine')").status == "passed"
    failed = ran("print('before'); raise SystemExit(3)")
    assert (failed.status, failed.output) == ("failed", ["before"])
    hung = ran("import time; print('waiting', flush=True); time.sleep(60)", minutes=0.05)
    assert (hung.status, hung.output) == ("hung", ["waiting"])


def test_results_cut_off_in_the_middle_lose_no_more_than_themselves(tmp_path):
    code = "open('{}', 'w').write('[1, 2')".format(tmp_path / "half.json")
    outcome = run_step(Step("made up", "", (), writes="half.json"), [sys.executable, "-c", code], tmp_path)
    assert (outcome.status, outcome.results) == ("passed", None)


def test_a_pytest_report_becomes_claims(tmp_path):
    (tmp_path / "tests.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.rocm.test_numerics" name="a"/>'
        '<testcase classname="tests.rocm.test_numerics" name="b"><skipped/></testcase>'
        '<testcase classname="tests.rocm.test_graphs" name="a"><failure/></testcase>'
        '<testcase classname="tests.rocm.test_collectives" name="a"><skipped/></testcase>'
        '<testcase classname="tests.kernels.test_isa" name="a"/>'
        "</testsuite></testsuites>"
    )
    tests = read_tests(tmp_path / "tests.xml")
    assert tests == {"test_numerics": "passed", "test_graphs": "failed", "test_collectives": "skipped"}
    outcomes = [Outcome("tests", "failed"), Outcome("vision", "passed", results={"speeds": []})]
    result = Result(**claims_of(outcomes, tests, "AMD Instinct MI355X", 8))
    held = {claim.test: claim.status(result) for claim in CLAIMS if claim.rung == "device"}
    assert held["test_numerics"] == held["speed"] == "holds"
    assert held["test_graphs"] == "**fails**"
    assert held["test_collectives"] is None
    assert read_tests(tmp_path / "none.xml") == {}
