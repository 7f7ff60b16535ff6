"""The scripts' own promises: help without installing, the right Python, one-line errors, a converted checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from serving.models import bind_decoder
from vitbatch.checkpoint import bind_tower
from vitstripe.checkpoint import Checkpoint, load

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(p for p in (ROOT / "scripts").iterdir() if p.is_file())
DIGITS_MODEL = ROOT / "serving" / "assets" / "digits_vlm"
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs bash lines after sourcing scripts/lib/env.sh."""
    return subprocess.run(
        ["bash", "-c", f"source '{ROOT}/scripts/lib/env.sh'; {script}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda p: p.name)
def test_scripts_can_be_run_and_parse(path):
    assert os.access(path, os.X_OK)
    if path.read_text().startswith("#!/usr/bin/env bash"):
        subprocess.run(["bash", "-n", path], check=True)


def test_scripts_name_no_package_index():
    texts = {p: p.read_text() for p in [*SCRIPTS, *(ROOT / "scripts" / "lib").glob("*.*"), ROOT / ".ci" / "run"]}
    assert [p.name for p, text in texts.items() if re.search(r"pypi|--(extra-)?index-url|--find-links", text)] == []


def test_the_help_of_scripts_test_explains_every_option_and_installs_nothing():
    help_text = subprocess.run([ROOT / "scripts" / "test", "--help"], capture_output=True, text=True, check=True)
    assert help_text.stderr == ""
    accepted = set(re.findall(r"^ *(--[a-z-]+)[ )|]", (ROOT / "scripts" / "test").read_text().split("while ")[1], re.M))
    assert accepted >= {"--all", "--parity", "--python"}
    assert [option for option in accepted if option not in help_text.stdout] == []


def test_a_python_shim_that_fails_is_passed_over(tmp_path):
    shims = tmp_path / "shims"
    shim = fake_python(shims, f"python{THIS_PYTHON}", "echo 'command not found' >&2; exit 127")
    real = tmp_path / "versions" / f"{THIS_PYTHON}.99" / "bin"
    real.parent.parent.mkdir()
    real.parent.mkdir()
    working = fake_python(real, f"python{THIS_PYTHON}", f'exec "{sys.executable}" "$@"')
    path = f"{shims}:{os.environ['PATH']}"
    found = shell(f"find_python {THIS_PYTHON}", PATH=path, PYENV_ROOT=str(tmp_path)).stdout.strip()
    assert found != str(shim)
    assert found == str(working)


def test_a_python_that_is_too_old_is_named_with_what_would_do(tmp_path):
    old = fake_python(tmp_path, "python", "echo 3.9")
    result = shell("make_env dev", PYTHON=str(old))
    assert result.returncode == 1
    assert result.stderr == f"error: PYTHON={old} is Python 3.9; this project runs on 3.11 3.12 3.13\n"


def test_a_python_without_venv_is_an_error_that_names_the_package(tmp_path):
    bare = fake_python(tmp_path, "python", 'case "$2" in *ensurepip*) exit 1 ;; *) echo 3.12 ;; esac')
    result = shell("make_env dev", PYTHON=str(bare))
    assert result.returncode == 1
    assert result.stderr == f"error: PYTHON={bare} lacks the venv module (on Debian and Ubuntu: python3.12-venv)\n"


def test_a_failed_installation_shows_the_end_of_its_log(tmp_path):
    result = shell(f"run_with_progress installing {tmp_path}/log sh -c 'echo no such package; exit 3' || echo failed")
    assert result.stdout == "failed\n"
    assert "FAILED" in result.stderr
    assert result.stderr.endswith("no such package\n")


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The converter as the wrapper runs it, in this environment."""
    command = [sys.executable, ROOT / "scripts" / "lib" / "convert_checkpoint.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.multidevice
def test_a_converted_checkpoint_loads_the_same_weights_on_any_number_of_devices(tmp_path, mesh_of):
    target = tmp_path / "converted"
    result = convert(DIGITS_MODEL, target)
    assert result.returncode == 0, result.stderr
    source, converted = Checkpoint(DIGITS_MODEL), Checkpoint(target)
    assert converted.is_orbax
    assert converted.config == source.config
    for tp in (1, 2):
        for binder in (lambda c, tp=tp: bind_decoder(c, tp=tp, dtype=jnp.float32), bind_tower):
            loaded = [load(c, binder(c), mesh_of(tp)) for c in (source, converted)]
            first, second = (nnx.to_flat_state(state) for state in loaded)
            assert len(first) == len(second)
            for (path, a), (_, b) in zip(first, second, strict=True):
                np.testing.assert_array_equal(np.asarray(a.get_value()), np.asarray(b.get_value()), err_msg=str(path))


def test_the_converter_refuses_a_missing_source_in_one_line(tmp_path):
    result = convert(tmp_path / "none", tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr == f"error: {tmp_path}/none is not a folder; give the folder that holds config.json\n"
    assert not (tmp_path / "out").exists()
