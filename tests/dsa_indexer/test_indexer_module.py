"""The parts of the indexer that the reference checkpoints do not vary: key norms, rotations, frequencies, switches."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_indexer import Indexer, IndexerConfig, Yarn, inverse_frequencies, rope_tables
from tests.helpers import det, relative_error

CONFIG = IndexerConfig(
    num_heads=3,
    head_dim=16,
    topk=5,
    rope_dim=6,
    rope_theta=10000.0,
    q_lora_rank=10,
    hidden_size=20,
    layer_types=("full",),
)
T = 7


def _run(config: IndexerConfig, with_angles: bool = True):
    """queries, gates and keys of 7 tokens by an indexer whose parameters are the same numbers each time."""
    indexer = Indexer(config, jnp.float32)
    for i, (_, leaf) in enumerate(sorted(nnx.to_flat_state(nnx.state(indexer)), key=lambda item: str(item[0]))):
        leaf.set_value(jnp.asarray(det(leaf.get_value().shape, 50 + i)))
    graphdef, state = nnx.split(indexer)
    tables = (None, None)
    if with_angles:
        tables = rope_tables(jnp.arange(T), inverse_frequencies(config.rope_dim, config.rope_theta))

    @jax.jit
    def forward(state, x, q_lora):
        module = nnx.merge(graphdef, state)
        return *module.queries(x, q_lora, *tables), module.keys(x, *tables)

    return forward(state, det((T, 20), 1), det((T, 10), 2)), state


def _weights(state) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(leaf.get_value(), np.float64) for path, leaf in nnx.to_flat_state(state)
    }


def _rotated(x: np.ndarray, interleaved: bool) -> np.ndarray:
    """Pair by pair, in float64. x [T, 16], of which the first 6 dimensions turn."""
    out = x.copy()
    for t in range(T):
        for j in range(3):
            angle = t * 10000.0 ** (-2 * j / 6)
            a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + 3)
            out[t, a] = x[t, a] * math.cos(angle) - x[t, b] * math.sin(angle)
            out[t, b] = x[t, b] * math.cos(angle) + x[t, a] * math.sin(angle)
    return out


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize(("k_norm", "eps"), [("layer", 1e-6), ("layer", 0.5), ("rms", 0.5)])
def test_keys_are_normalised_as_the_config_says_and_then_rotated(k_norm, eps, interleaved):
    (_, _, keys), state = _run(replace(CONFIG, k_norm=k_norm, k_norm_eps=eps, rope_interleaved=interleaved))
    weights = _weights(state)
    assert ("k_norm.bias" in weights) == (k_norm == "layer")
    h = det((T, 20), 1).astype(np.float64) @ weights["wk.weight"].T
    if k_norm == "layer":
        h = h - h.mean(-1, keepdims=True)
    h = h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * weights["k_norm.weight"] + weights.get("k_norm.bias", 0)
    assert relative_error(keys, _rotated(h, interleaved)) < 1e-6


def test_queries_are_rotated_at_the_front_of_each_head_and_gates_carry_the_scale():
    (q, gates, _), state = _run(CONFIG)
    weights = _weights(state)
    raw = (det((T, 10), 2).astype(np.float64) @ weights["wq_b.weight"].T).reshape(T, 3, 16)
    for head in range(3):
        assert relative_error(q[:, head], _rotated(raw[:, head], True)) < 1e-6
    want = det((T, 20), 1).astype(np.float64) @ weights["weights_proj.weight"].T / math.sqrt(3 * 16)
    assert relative_error(gates, want) < 1e-6


def test_one_switch_rotates_queries_and_keys_and_leaves_the_scores():
    (q, gates, keys), _ = _run(CONFIG)
    (q_spread, same_gates, keys_spread), _ = _run(replace(CONFIG, hadamard=True))
    assert relative_error(q_spread, q) > 0.1
    assert relative_error(keys_spread, keys) > 0.1
    np.testing.assert_array_equal(same_gates, gates)
    dots = jnp.einsum("mhd,nd->mhn", q, keys)
    assert relative_error(jnp.einsum("mhd,nd->mhn", q_spread, keys_spread), dots) < 1e-6


def test_without_rotation_no_angles_are_needed_and_with_it_they_are():
    (q, _, keys), _ = _run(replace(CONFIG, rope_dim=0), with_angles=False)
    (q_turned, _, keys_turned), _ = _run(CONFIG)
    # Position 0 is not turned, the others are.
    np.testing.assert_allclose(q[0], q_turned[0], rtol=1e-6)
    np.testing.assert_allclose(keys[0], keys_turned[0], rtol=1e-6)
    assert relative_error(keys[1:], keys_turned[1:]) > 0.1
    with pytest.raises(ValueError, match="rotates 6 dimensions of a head; pass cos and sin of 3 angles"):
        _run(CONFIG, with_angles=False)


V32 = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)


def test_plain_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(inverse_frequencies(8, 1e4), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_yarn_keeps_fast_frequencies_divides_slow_ones_and_ramps_in_between():
    """DeepSeek-V3.2's: of 32 pairs the ramp runs from pair 10 to pair 23."""
    plain, stretched = inverse_frequencies(64, 1e4), inverse_frequencies(64, 1e4, V32)
    ratio = plain / stretched
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 40, rtol=1e-6)
    np.testing.assert_allclose(1 / ratio[10:24], 1 + (1 / 40 - 1) * np.arange(14) / 13, rtol=1e-6)


def test_the_turning_counts_set_the_ends_of_the_ramp():
    """Pair j makes 4096 * theta^(-j / 32) / (2 pi) turns: more than 32 up to the ramp, fewer than 1 after it."""
    turns = 4096 * inverse_frequencies(64, 1e4).astype(np.float64) / (2 * math.pi)
    assert turns[10] > 32 > turns[11]
    assert turns[22] > 1 > turns[23]


@pytest.mark.parametrize(
    ("change", "amplitude"),
    [
        ({}, 1.0),
        ({"mscale_all_dim": 0.707}, (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1)),
        ({"mscale": None, "mscale_all_dim": None}, 0.1 * math.log(40) + 1),
        ({"mscale_all_dim": None}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_the_amplitude_follows_the_magnitude_scales(change, amplitude):
    yarn = replace(V32, **change)
    assert yarn.amplitude == pytest.approx(amplitude, rel=1e-12)
    cos, sin = rope_tables(jnp.arange(3), inverse_frequencies(4, 100.0), yarn.amplitude)
    np.testing.assert_allclose(np.square(cos) + np.square(sin), np.full((3, 2), amplitude**2), rtol=1e-6)


def test_a_short_original_context_does_not_divide_by_zero():
    frequencies = inverse_frequencies(4, 1e4, Yarn(factor=2.0, original_max_position_embeddings=1))
    assert np.isfinite(frequencies).all()
    np.testing.assert_allclose(frequencies, inverse_frequencies(4, 1e4) / [1, 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"factor": 0.5}, r"factor is 0\.5"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"beta_slow": 64.0}, "need beta_fast >= beta_slow"),
    ],
)
def test_a_yarn_that_cannot_be_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        replace(V32, **change)
