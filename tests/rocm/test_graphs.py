"""On an AMD GPU: HIP graphs on and off give the same numbers, and a crash with them is told as such. `-m rocm`."""

import os
import subprocess
import sys

import pytest

from vitstripe.rocm import COMMAND_BUFFER_FLAG

pytestmark = pytest.mark.rocm

# A loop on the device, whose replay is what crashes, and some matrix products around it.
_PROGRAM = """
import jax, jax.numpy as jnp
@jax.jit
def run(x, n):
    return jax.lax.fori_loop(0, n, lambda i, y: jnp.tanh(y @ x) + i, x @ x)
x = jax.random.normal(jax.random.key(1), (96, 96))
for n in (3, 17, 17, 40):
    out = run(x, n)
print(jax.devices()[0].platform, [float(v).hex() for v in jnp.ravel(out)[::997]])
"""


def outcome(flag: str) -> str:
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (
        f"exit {done.returncode} with {flag}; a crash while a loop is replayed is openxla/xla#46952\n"
        f"{done.stderr[-2000:]}"
    )
    return done.stdout


def test_graphs_on_and_off_give_the_same_numbers():
    off = outcome(f"{COMMAND_BUFFER_FLAG}=")
    assert outcome(f"{COMMAND_BUFFER_FLAG}=FUSION,WHILE,CONDITIONAL") == off
