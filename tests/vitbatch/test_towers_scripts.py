"""scripts/make_goldens and scripts/check_parity: what they refuse, and a round trip where torch is installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.helpers import GOLDENS, det

ROOT = Path(__file__).parents[2]
LIB = ROOT / "scripts" / "lib"


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, LIB / f"{name}.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def make_goldens(monkeypatch):
    monkeypatch.syspath_prepend(str(LIB))
    import make_goldens

    return make_goldens.main


def test_goldens_of_nothing_or_into_something_are_refused(make_goldens, tmp_path, capsys):
    assert make_goldens([str(tmp_path / "out"), "--config", str(tmp_path)]) == 1
    assert "config.json does not exist; give a config.json or a folder that holds one" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert make_goldens([str(tmp_path), "--config", str(tmp_path)]) == 1
    assert "exists and is not empty; choose a new folder" in capsys.readouterr().err
    assert make_goldens([str(tmp_path / "out"), "--config", str(tmp_path)]) == 1
    assert "error: model_type 'llama' has no vision tower here; supported: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_checkpoint_cannot_be_checked(tmp_path):
    ran = script("check_parity", tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"error: {tmp_path} holds no config.json, so it is not a checkpoint folder\n"


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("torch"), reason="NOT MEASURED: needs torch and transformers (extra: goldens)")
@pytest.mark.parametrize("family", ["qwen3_vl", "glm5_next"])
def test_goldens_made_for_a_config_are_met_and_name_their_inputs(family, tmp_path):
    ran = script("make_goldens", tmp_path / "out", "--config", GOLDENS / family / "config.json", "--seed", 3)
    assert ran.returncode == 0, ran.stderr
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    made = load_file(tmp_path / "out" / "golden_vision.safetensors")
    assert (meta["family"], meta["weights"], meta["seed"]) == (family, "random", 3)
    assert set(meta["vision"]) == {key.partition(".")[0] for key in made}
    ran = script("check_parity", tmp_path / "out", "--tp", 2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "above" not in ran.stdout
    ran = script("check_parity", tmp_path / "out", "--bound", 1e-9)
    assert ran.returncode == 1
    assert "0 of " in ran.stdout


@pytest.mark.skipif(not find_spec("torch"), reason="NOT MEASURED: needs torch and transformers (extra: goldens)")
def test_inputs_are_those_of_the_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(LIB))
    from reference_tower import exact_inputs

    assert exact_inputs((7, 5), 12).tolist() == det((7, 5), 12).tolist()
