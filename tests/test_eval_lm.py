"""scripts/eval_lm: which tasks may ask the hub, and that the lines in the documents are ones it takes."""

import re
import shlex
from pathlib import Path

import pytest

from scripts.lib.eval_lm import LOCAL, arguments, environment

DOCS = Path(__file__).parents[1] / "docs"
LINES = [
    line
    for file in sorted(DOCS.glob("*.md"))
    for line in re.findall(r"^scripts/eval_lm (.*?)(?:  .*)?$", file.read_text().replace("\\\n", " "), re.M)
]


def test_tasks_of_our_own_never_ask_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    offline = environment(sorted(LOCAL))
    assert (offline["HF_HUB_OFFLINE"], offline["HF_DATASETS_OFFLINE"]) == ("1", "1")


def test_tasks_with_data_on_the_hub_may_ask_it(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    assert not {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"} & environment(["niah_single_1", "gsm8k"]).keys()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert environment(["gsm8k"])["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("line", LINES)
def test_the_lines_in_the_documents_are_taken(line):
    given = arguments(shlex.split(line))
    assert all(argument not in given.more for argument in ("--tasks", "--url", "--model"))
    assert not given.more or given.more[0].startswith("--")
