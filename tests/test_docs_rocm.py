"""docs/rocm.md: its table is what the commands wrote and is not older than the list of programs; its lines resolve."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.lib import check_rocm
from scripts.lib.program_list import Scope, listed
from scripts.lib.rocm_claims import (
    BEGIN,
    CLAIMS,
    END,
    NOT_MEASURED,
    RUNGS,
    Result,
    block_of,
    current_block,
    read_report,
    read_results,
    write_docs,
)
from scripts.lib.rocm_lowering import rocm_mesh
from vitbatch.config import TINY_BLOCK, Bucket
from vitstripe.platform import Platform

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "rocm.md").read_text()
INSTALL_LINES = re.findall(r"^pip install (.*)$", TEXT, re.M)
UNREACHABLE = re.compile(r"Retrying|NewConnectionError|ConnectTimeout|Temporary failure|ProxyError")


def test_the_table_of_claims_is_what_the_commands_wrote():
    assert current_block() == block_of(read_results()), "run scripts/check_rocm --lower --write-docs"


def test_no_program_is_newer_than_the_table():
    scope = Scope(buckets=(Bucket(256, TINY_BLOCK), Bucket(512)), every_input=False, prefill_tokens=64, max_seqs=1)
    found, _ = listed(rocm_mesh(8, "gfx950"), Platform("rocm", "gfx950", ""), scope)
    kinds = {f"{one.group}: {one.kind}" for one in found}
    written = read_results().get("lower")
    assert written is not None, "nothing was lowered for the table yet: run scripts/check_rocm --lower --write-docs"
    assert kinds == set(written.numbers["programs"]), "run scripts/check_rocm --lower --write-docs"


def test_a_rung_without_a_result_is_not_measured():
    block = block_of({})
    assert block.count(NOT_MEASURED) == len(CLAIMS)
    assert all(rung in block for rung in RUNGS.values())
    assert "{" not in block


def test_a_report_of_a_machine_fills_in_its_own_claims_only(tmp_path):
    document, results = tmp_path / "rocm.md", tmp_path / "claims.json"
    document.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    tests = {"test_numerics": "passed", "test_graphs": "failed", "test_collectives": "skipped"}
    device = Result("device", False, {"on": " on 8 x AMD Instinct MI355X", "tests": tests})
    write_docs({"device": device}, document, results)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    (numerics,) = re.findall(r".*Numbers equal.*", text)
    assert "on 8 x AMD Instinct MI355X" in numerics
    assert "| holds, " in numerics
    assert "**fails**" in re.findall(r".*HIP graphs.*", text)[0]
    assert NOT_MEASURED in re.findall(r".*RCCL.*", text)[0]
    assert read_results(results)["device"].numbers == device.numbers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"smoke": true, "claims": null}', "measures nothing"),
        ('{"claims": {"rung": "lower", "passed": true}}', "its rung is 'lower'"),
        ('{"claims": {"rung": "device"}}', "is no report of scripts/on_rocm"),
        ('{"steps": []}', "is no report of scripts/on_rocm"),
        ("[1, 2", "is no report of scripts/on_rocm"),
        (None, "cannot be read"),
    ],
)
def test_what_measures_no_amd_gpu_cannot_fill_in_a_claim(text, says, tmp_path, capsys):
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_report(file)
    before = current_block()
    assert check_rocm.main(["--report", str(file), "--write-docs"]) == 1
    assert says in capsys.readouterr().out
    assert current_block() == before


def test_every_install_line_names_an_extra_that_exists():
    extras = re.findall(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    names = set(re.findall(r"^(\w+) = \[", extras[0], re.M))
    assert (
        {extra for line in INSTALL_LINES for extra in re.findall(r"\.\[(\w+)\]", line)} == {"rocm7", "rocm10"} <= names
    )


@pytest.mark.parametrize(("line", "python"), [*((line, "3.12") for line in INSTALL_LINES), (INSTALL_LINES[0], "3.11")])
def test_the_install_lines_resolve(line, python):
    """By a dry run of pip under a Python that the plugins are built for; pip asked for another Python's packages still
    goes by its own."""
    (extra,) = re.findall(r"\.\[(\w+)\]", line)
    command = [sys.executable, "-m", "pip", "--python", interpreter(python), "--retries", "1", "install", "--dry-run"]
    command += ["--quiet", "--ignore-installed", "--only-binary=:all:", "--report", "-"]
    done = subprocess.run([*command, *requirements_of(extra)], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    chosen = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    versions = {package["name"]: package["version"] for package in chosen}
    assert len({versions[name] for name in versions if name == "jax" or name.startswith("jax-rocm")}) == 1, versions
    (row,) = re.findall(rf"^\| {re.escape(versions['jax'])} \| (.*)$", TEXT, re.M)
    assert f"jax-{extra}-plugin {versions['jax']}" in row, "the table of versions"
    assert "what pip takes" in row, "the table of versions"


def interpreter(version: str) -> str:
    """A Python of that version, as the scripts find one."""
    find = f"source {shlex.quote(str(ROOT / 'scripts' / 'lib' / 'env.sh'))}; find_python {version}"
    found = subprocess.run(["bash", "-c", find], capture_output=True, text=True, check=False).stdout.strip()
    return found or pytest.skip(f"NOT MEASURED: needs Python {version}, none is found here")


def requirements_of(extra: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [r for r in project["dependencies"] if r.startswith("jax")] + project["optional-dependencies"][extra]
