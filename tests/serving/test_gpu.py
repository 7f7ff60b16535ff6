"""The served path on one GPU, in bfloat16 as it is served: right answers, nothing compiled after ready. `-m gpu`."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.config import EngineConfig
from serving.models.decoder import Selection
from tests.helpers import relative_error
from tests.serving.demo_server import DIGITS, PHOTOS, Server
from tests.serving.harness import Driver, checkpoint_at
from vitbatch import EncoderConfig

pytestmark = pytest.mark.gpu


def needs(devices):
    """A mark: skipped where fewer GPUs are there."""
    return pytest.mark.skipif(f"len(jax.devices()) < {devices}", reason=f"NOT MEASURED: needs {devices} GPUs")


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=needs(2))])
def test_digits_and_photographs_in_one_burst(tp):
    server = Server(EngineConfig(tp=tp, max_model_len=512, max_seqs=16), EncoderConfig())
    server.engine.start()
    digits = [(path.name.split("_")[1], server.prepare(path.read_bytes())) for path in DIGITS]
    photos = [server.prepare(path.read_bytes()) for path in PHOTOS]
    for _ in range(3):
        futures = [(label, server.ask(image)) for label, image in digits] + [(None, server.ask(p)) for p in photos]
        answers = [(label, future.result(60)[0]) for label, future in futures]
        assert [a for a in answers if a[0] is not None and a[0] != a[1]] == []
    assert server.runner.lm.dtype == jax.numpy.bfloat16
    assert server.guard.after_ready == 0
    assert server.close()
    assert server.idle()


@pytest.mark.parametrize("stripe", [None, 8])
def test_sparse_attention_logits_match_the_reference_in_float32(goldens, stripe):
    golden = load_file(goldens / "glm_moe_dsa" / "golden_text.safetensors")
    driver = Driver(checkpoint_at(goldens / "glm_moe_dsa", latent_norm_eps=1e-6), 1)
    seq = driver.sequence(golden["txt.input_ids"][0])
    logits = driver.prefill(seq, [13], Selection(stripe))
    assert relative_error(logits, golden["txt.logits"][0]) < 2e-5
    assert driver.greedy(seq, int(logits[-1].argmax()), 12) == golden["txt.greedy12"][0].tolist()
    assert all((np.asarray(s) < 48).all() for s in driver.selections)


@needs(2)
@pytest.mark.parametrize("merge", ["pmax", "all_gather"])
def test_striped_selections_are_the_bits_of_the_replicated_program_on_every_gpu(goldens, merge):
    driver = Driver(checkpoint_at(goldens / "glm_moe_dsa"), 2)
    ids = np.random.default_rng(4).integers(0, 256, 61)
    driver.prefill(driver.sequence(ids), [])
    replicated = [np.asarray(s) for s in driver.selections]
    driver.prefill(driver.sequence(ids), [], Selection(8, merge))
    for ours, theirs in zip(driver.selections, replicated, strict=True):
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), theirs)
