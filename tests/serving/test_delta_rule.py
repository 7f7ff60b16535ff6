"""The delta rule in its chunked form and its step form against the recurrence in float64, written again in numpy, and
the short convolution in front of it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.batch import Packer
from serving.config import STATE_CHUNK, EngineConfig
from serving.models.delta_rule import delta_chunked, delta_recurrent, delta_rule, l2_normalise
from serving.models.short_conv import short_conv
from serving.protocol import SamplingParams, Submission
from serving.scheduler import Chunk
from serving.sequence import Sequence
from tests.helpers import relative_error

FLOOR = -5.0
H, K, V = 3, 24, 40
SEATS = 5
CONFIG = EngineConfig(max_model_len=320, page_size=8, max_seqs=SEATS, prefill_tokens=400)


@dataclass(frozen=True)
class Rows:
    """What one request feeds the rule, float64."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray

    @property
    def arrays(self):
        return (self.q, self.k, self.v, self.g, self.beta)

    def part(self, start, stop):
        return Rows(*(x[start:stop] for x in self.arrays))


def unit(x):
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True))


def request(length, gates="channel", keys="random", seed=0):
    """gates: "channel" decays within the floor, "fixed" ones that are at it or at zero by channel, "bursts" that are at
    it or near zero by row, "free" ones without a bound, "head" one decay a head, "wild" one a head, anything to -1000.
    keys: "random", "alike", or "equal" with decays near zero and input gates near one, where a chunk's system is worst
    conditioned."""
    draw = np.random.default_rng(seed)
    width = 1 if gates in ("head", "wild") else K
    bounded = FLOOR / (1 + np.exp(-2 * draw.normal(size=(length, H, width)) - np.linspace(-8, 1, width)))
    g = {
        "channel": bounded,
        "head": bounded,
        "fixed": np.broadcast_to(np.where(np.arange(K) % 2, FLOOR, -1e-3), (length, H, K)),
        "bursts": np.where(draw.random((length, H, K)) < 0.4, FLOOR, -1e-4),
        "free": np.where(draw.random((length, H, K)) < 0.2, -300.0, bounded),
        "wild": np.where(draw.random((length, H, 1)) < 0.2, -1000.0, -1e-3),
    }[gates]
    beta = 1 / (1 + np.exp(-draw.normal(size=(length, H))))
    noise, base = draw.normal(size=(length, H, K)), draw.normal(size=(1, H, K))
    k = unit({"random": noise, "alike": base + 0.1 * noise, "equal": base + 0 * noise}[keys])
    if keys != "random":
        g, beta = g * 1e-4, np.full_like(beta, 0.99)
    return Rows(unit(draw.normal(size=(length, H, K))) * K**-0.5, k, draw.normal(size=(length, H, V)), g, beta)


def recurrence(rows, state):
    """(o, state) token by token in float64."""
    state, out = np.array(state, np.float64), []
    for q, k, v, g, beta in zip(*rows.arrays, strict=True):
        state = state * np.exp(g)[:, :, None]
        d = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * d[:, None, :]
        out.append(np.einsum("hk,hkv->hv", q, state))
    return np.array(out), state


def start_state(seed=5):
    return np.random.default_rng(seed).normal(size=(H, K, V))


chunked = jax.jit(delta_chunked, static_argnames="gate_floor")
rule = jax.jit(delta_rule, static_argnames="gate_floor")
convolve = jax.jit(short_conv)


def by_chunks(rows, state, floor=FLOOR):
    """(o, state) by the chunked form, the request alone in seat 1 of three. All in one shape: rows that change nothing
    fill it up."""
    length, chunks = len(rows.q), 4
    states = np.full((3, H, K, V), np.nan, np.float32)
    states[1] = state
    filled = [np.concatenate([x, np.zeros((chunks * STATE_CHUNK - length, *x.shape[1:]))]) for x in rows.arrays]
    args = [jnp.asarray(x, jnp.float32) for x in filled]
    o, new = chunked(*args, states, np.ones(chunks, np.int32), np.zeros(chunks, bool), gate_floor=floor)
    assert np.isnan(np.asarray(new)[[0, 2]]).all(), "other seats keep what they hold"
    return np.asarray(o)[:length], np.asarray(new)[1]


def assert_close(actual, expected, within=2e-6):
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_error(ours, theirs) < within


def seated(seat, length):
    """A request with tokens to prefill, in a seat."""
    submission = Submission(f"r{seat}", [1] * length, (), SamplingParams(1, temperature=0.0))
    seq = Sequence(submission, lambda event: None, np.zeros((3, length), np.int32), 0, seed=0)
    seq.seat = seat
    seq.add_pages(range(-(-length // CONFIG.page_size)))
    return seq


def prefill_step(parts, rows=400):
    """The Step of a prefill pass. parts: (seat, start, stop) of each request."""
    chunks = [Chunk(seated(seat, stop), start, stop, STATE_CHUNK) for seat, start, stop in parts]
    return Packer(CONFIG, 200, gather_pages=0).extend(chunks, rows)[2]


def laid_out(parts, rows=400):
    """[rows, ...] arrays of a pass: each request's part where its rows are, and noise, not zeros, in the padding."""
    draw, at, out = np.random.default_rng(9), 0, None
    for part in parts:
        out = out or [draw.normal(size=(rows, *x.shape[1:])) for x in part]
        for whole, x in zip(out, part, strict=True):
            whole[at : at + len(x)] = x
        at += -(-len(part[0]) // STATE_CHUNK) * STATE_CHUNK
    return [jnp.asarray(x, jnp.float32) for x in out or []]


def split_up(array, lengths):
    """The parts of a pass's rows again."""
    starts = np.cumsum([0, *(-(-n // STATE_CHUNK) * STATE_CHUNK for n in lengths)])
    return [np.asarray(array)[a : a + n] for a, n in zip(starts, lengths, strict=False)]


# -- one request


@pytest.mark.parametrize("length", [1, 15, 64, 77, 200])
@pytest.mark.parametrize(("gates", "floor"), [("channel", FLOOR), ("channel", None), ("head", None)])
def test_chunks_give_what_the_recurrence_gives(length, gates, floor):
    rows, state = request(length, gates), start_state()
    assert_close(by_chunks(rows, state, floor), recurrence(rows, state))


@pytest.mark.parametrize(("gates", "floor"), [("fixed", FLOOR), ("bursts", FLOOR), ("free", None), ("wild", None)])
def test_strong_decays_lose_no_digits(gates, floor):
    rows, state = request(200, gates), start_state()
    assert_close(by_chunks(rows, state, floor), recurrence(rows, state))


@pytest.mark.parametrize("keys", ["alike", "equal"])
@pytest.mark.parametrize(("gates", "floor"), [("channel", FLOOR), ("head", None)])
def test_keys_of_repeated_tokens_lose_no_digits(gates, floor, keys):
    rows, state = request(200, gates, keys), start_state()
    assert_close(by_chunks(rows, state, floor), recurrence(rows, state), within=5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["random", "equal"])
@pytest.mark.parametrize(("gates", "floor"), [("channel", FLOOR), ("bursts", FLOOR), ("free", None), ("wild", None)])
def test_on_a_gpu_chunks_lose_no_digits(gates, floor, keys):
    rows, state = request(200, gates, keys), start_state()
    assert_close(by_chunks(rows, state, floor), recurrence(rows, state), within=5e-6)


@pytest.mark.parametrize("gates", ["channel", "head"])
def test_the_plain_recurrence_is_the_one_of_the_definition(gates):
    rows, state = request(40, gates), start_state()
    ours = jax.jit(delta_recurrent)(*(jnp.asarray(x, jnp.float32) for x in (*rows.arrays, state)))
    assert_close(ours, recurrence(rows, state))


@pytest.mark.parametrize("cuts", [[77], [1, 2, 66], [64, 128]])
def test_any_split_of_a_prompt_gives_the_same(cuts):
    rows, state = request(200), start_state()
    expected, parts, now = recurrence(rows, state), [], state
    for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
        o, now = by_chunks(rows.part(start, stop), now)
        parts.append(o)
    assert_close((np.concatenate(parts), now), expected)


def test_normalised_rows_have_the_eps_inside_the_root():
    x = jnp.array([[3e-3, -4e-3], [0.0, 0.0]])
    np.testing.assert_allclose(l2_normalise(x), [[3e-3 / np.sqrt(26e-6), -4e-3 / np.sqrt(26e-6)], [0, 0]], rtol=1e-6)


# -- the requests of a pass


@pytest.mark.parametrize(("gates", "floor"), [("channel", FLOOR), ("head", None)])
def test_requests_of_a_prefill_pass_do_not_see_each_other(gates, floor):
    """A new request in a seat that holds NaN, one that goes on, one of a single row; and seats that are not theirs."""
    lengths, seats = (130, 70, 1), (4, 0, 2)
    rows = [request(n, gates, seed=i) for i, n in enumerate(lengths)]
    states = np.random.default_rng(1).normal(size=(SEATS, H, K, V)).astype(np.float32)
    states[4] = np.nan
    starts = (0, 33, 90)
    step = prefill_step([(s, a, a + n) for s, a, n in zip(seats, starts, lengths, strict=True)])
    o, new = rule(*laid_out([r.arrays for r in rows]), states, step, gate_floor=floor)
    for i, part in enumerate(split_up(o, lengths)):
        before = states[seats[i]] if starts[i] else np.zeros((H, K, V))
        assert_close((part, np.asarray(new)[seats[i]]), recurrence(rows[i], before))
    np.testing.assert_array_equal(np.asarray(new)[[1, 3]], states[[1, 3]])


@pytest.mark.parametrize(("gates", "floor"), [("channel", FLOOR), ("channel", None), ("head", None)])
def test_a_prefill_pass_goes_from_chunk_to_chunk_and_not_from_row_to_row(gates, floor):
    """448 rows are 7 chunks: nothing but the state goes through them, and only 15 substitutions inside a block of 16
    are one after another besides."""
    rows, step = request(448, gates), prefill_step([(0, 0, 300), (1, 0, 120)], rows=448)
    args = [jnp.asarray(x, jnp.float32) for x in (*rows.arrays, np.zeros((SEATS, H, K, V)))]
    jaxpr = jax.make_jaxpr(lambda *args: delta_rule(*args, step, gate_floor=floor))(*args)
    assert sorted(loops_of(jaxpr.jaxpr)) == [7, 15]


def loops_of(jaxpr):
    """How often each loop of a program goes round."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("scan", "while"):
            yield equation.params.get("length")
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from loops_of(inner)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("gates", "floor"), [("channel", FLOOR), ("head", None)])
def test_a_decode_pass_advances_its_own_seats_and_no_other(gates, floor, size):
    """Few rows of five seats, and most of them."""
    seats = (3, 1)
    rows = [request(1, gates, seed=i) for i in range(2)]
    states = np.random.default_rng(1).normal(size=(SEATS, H, K, V)).astype(np.float32)
    states[4] = np.nan
    step = Packer(CONFIG, 200, gather_pages=0).decode([seated(s, 9 + s) for s in seats], size)
    draw = np.random.default_rng(2)
    inputs = [
        jnp.asarray(np.concatenate([*x, draw.normal(size=(size - 2, *x[0].shape[1:]))]), jnp.float32)
        for x in zip(*(r.arrays for r in rows), strict=True)
    ]
    o, new = rule(*inputs, states, step, gate_floor=floor)
    for i, seat in enumerate(seats):
        assert_close((np.asarray(o)[i : i + 1], np.asarray(new)[seat]), recurrence(rows[i], states[seat]))
    np.testing.assert_array_equal(np.asarray(new)[[0, 2, 4]], states[[0, 2, 4]])


# -- the short convolution

TAPS, CHANNELS = 4, 6


def convolution(x, weight, before):
    """(y, the rows to carry) in float64."""
    rows = np.concatenate([before, x])
    total = sum(weight[:, j] * rows[j : j + len(x)] for j in range(TAPS))
    return total / (1 + np.exp(-total)), rows[len(x) :]


def test_the_convolution_looks_at_its_own_request_alone():
    """New ones and ones that go on, and parts shorter than the taps, which keep some of what was carried."""
    draw = np.random.default_rng(0)
    lengths, seats, starts = (1, 70, 2, 130), (3, 0, 4, 1), (0, 33, 17, 0)
    parts, weight = [draw.normal(size=(n, CHANNELS)) for n in lengths], draw.normal(size=(CHANNELS, TAPS))
    carried = draw.normal(size=(SEATS, TAPS - 1, CHANNELS)).astype(np.float32)
    carried[[1, 3]] = np.nan
    step = prefill_step([(s, a, a + n) for s, a, n in zip(seats, starts, lengths, strict=True)])
    [x] = laid_out([[p] for p in parts])
    y, new = convolve(x, jnp.asarray(weight, jnp.float32), carried, step)
    for i, part in enumerate(split_up(y, lengths)):
        before = carried[seats[i]] if starts[i] else np.zeros((TAPS - 1, CHANNELS))
        assert_close((part, np.asarray(new)[seats[i]]), convolution(parts[i], weight, before), within=1e-6)
    np.testing.assert_array_equal(np.asarray(new)[2], carried[2])


def test_the_convolution_of_a_decode_pass_moves_its_own_seats_on():
    draw = np.random.default_rng(0)
    carried = draw.normal(size=(SEATS, TAPS - 1, CHANNELS)).astype(np.float32)
    x, weight = draw.normal(size=(4, CHANNELS)), draw.normal(size=(CHANNELS, TAPS))
    step = Packer(CONFIG, 200, gather_pages=0).decode([seated(3, 8), seated(1, 5)], 4)
    y, new = convolve(*(jnp.asarray(a, jnp.float32) for a in (x, weight)), carried, step)
    for i, seat in enumerate((3, 1)):
        expected = convolution(x[i : i + 1], weight, carried[seat])
        assert_close((np.asarray(y)[i : i + 1], np.asarray(new)[seat]), expected, within=1e-6)
    np.testing.assert_array_equal(np.asarray(new)[[0, 2, 4]], carried[[0, 2, 4]])
