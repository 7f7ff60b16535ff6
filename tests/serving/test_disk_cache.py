"""A second start finds every program of the first in JAX's cache on disk: programs are named alike in every process."""

import os
import subprocess
import sys

import pytest

from tests.helpers import GOLDENS

START = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from serving.config import EngineConfig
from serving.load import load_engine
from serving.metrics import Metrics
from vitbatch import CompileGuard, EncoderConfig
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh

seen = {"hits": 0, "misses": 0}

def on_event(event, **_):
    kind = event.rpartition("_")[2]
    if event.startswith("/jax/compilation_cache/cache_") and kind in seen:
        seen[kind] += 1

jax.monitoring.register_event_listener(on_event)
config = EngineConfig(tp=2, max_model_len=64, page_size=8, max_seqs=2, prefill_tokens=64, stripe_rows=8)
load_engine(
    Checkpoint(sys.argv[1]), make_mesh(2), config, EncoderConfig(),
    model_name="m", eos_ids=frozenset(), metrics=Metrics(), guard=CompileGuard(),
)
print(seen["hits"], seen["misses"])
"""


@pytest.mark.multidevice
def test_a_second_start_compiles_no_program_of_a_striped_decoder(tmp_path):
    environ = os.environ | {
        "PYTHONPATH": ".",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start() -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", START, str(GOLDENS / "glm_moe_dsa")],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        hits, misses = map(int, done.stdout.split())
        return hits, misses

    _, compiled = start()
    assert compiled > 10
    found, missed = start()
    assert missed == 0
    assert found >= compiled
