"""docs/architecture.md: the family that it shows whole is the file, and the files that it names are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("vitstripe", "vitbatch", "dsa_indexer", "serving")
NAMES = sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", TEXT)))


def statements(code: str) -> list[str]:
    """The statements of a module without imports and docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            del body[0]
    return [ast.unparse(node) for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]


def test_the_family_that_is_shown_is_the_whole_of_its_file():
    [shown] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert statements(shown) == statements((ROOT / "serving" / "models" / "glm_ocr.py").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_named_is_there(name):
    assert (ROOT / name).exists() or any(path for package in PACKAGES for path in (ROOT / package).rglob(name))
