"""On an AMD GPU: the server warms up, answers right in bfloat16, and compiles nothing afterwards. `-m rocm`."""

import jax
import jax.numpy as jnp
import pytest

from serving.config import EngineConfig
from tests.serving.demo_server import DIGITS, PHOTOS, Server
from vitbatch import EncoderConfig
from vitstripe.platform import default_platform

pytestmark = pytest.mark.rocm


@pytest.mark.parametrize("devices", ["one", "all"])
def test_digits_are_read_and_nothing_compiles_after_ready(devices):
    tp = 1 if devices == "one" else len(jax.devices())
    if devices == "all" and tp == 1:
        pytest.skip("NOT MEASURED: needs 2 devices")
    server = Server(EngineConfig(tp=tp, max_model_len=512, max_seqs=16), EncoderConfig())
    server.engine.start()
    assert server.guard.before_ready > 0
    for _ in range(2):
        asked = [(path.name.split("_")[1], server.ask(server.prepare(path.read_bytes()))) for path in DIGITS]
        others = [server.ask(server.prepare(path.read_bytes())) for path in PHOTOS]
        assert [(label, future.result(120)[0]) for label, future in asked if future.result(120)[0] != label] == []
        assert all(future.result(120) for future in others)
    assert server.guard.after_ready == 0
    assert (
        server.runner.lm.dtype
        == default_platform().default_dtype
        == (jnp.float32 if default_platform().kind == "cpu" else jnp.bfloat16)
    )
    assert server.close()
    assert server.idle()
