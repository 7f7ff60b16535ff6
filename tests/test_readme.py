"""The README's Python examples run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number):
    command = [sys.executable, "-W", "error", "-c", EXAMPLES[number]]
    # JAX 0.10 warns of a cached program that another process is still writing.
    environ = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
