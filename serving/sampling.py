"""Choosing the next token on the device, whatever a request asks for.

Order (vLLM's, with min-p last as in transformers):

    float32 logits -> log-probabilities that are told -> logit_bias and min_tokens -> repetition -> frequency
    -> presence -> greedy rows: the largest, done -> / temperature -> top-k -> top-p of what is left -> min-p -> draw

There are three programs, and the host knows which a batch needs: `greedy`, an argmax; `draw`, for rows that ask for
nothing but temperature and filters; and `sample`, for everything, each part behind a `lax.cond` on whether some row
needs it. On a GPU a branch holds the thread that dispatches it until the pass before it is done, and the host cannot
plan the next one meanwhile, so the first two have none there. No part sorts the vocabulary: thresholds are found bit by
bit, with one masked sum over the row each.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from serving.models.step import Leaf
from serving.protocol import MAX_LOGPROBS, SamplingParams, TokenLogprobs

LEAST_TEMPERATURE = 1e-5
"""Below it a row is greedy: dividing by less only overflows."""

LEAST_LOGPROB = -9999.0
"""Told in place of minus infinity, which JSON has no form for (as vLLM does)."""

_REALS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INTS = ("seed_low", "seed_high", "index", "top_k", "min_tokens", "seat", "logprobs")
_TEMPERATURE, _TOP_P, _REPETITION = (_REALS.index(name) for name in ("temperature", "top_p", "repetition"))
_INDEX, _SEAT, _LOGPROBS = _INTS.index("index"), _INTS.index("seat"), _INTS.index("logprobs")
NOT_SEATED = (1 << 31) - 1
"""The seat of a row that has none, past the end of every table: reads of it are masked, writes dropped."""
_IN_PROMPT, _ENDS_ANSWER, _ONCE = 1, 2, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleArgs:
    """What R requests ask for, in two arrays because each array is a transfer.

    reals float32 [R, 6]: temperature (0 is greedy), top_p, min_p, presence, frequency and repetition penalty.
    ints int32 [R, 7]: the seed's two words, index (tokens generated so far), top_k (0 off), min_tokens, seat (row of
    Seats, NOT_SEATED for none) and logprobs (alternatives to tell, -1 for nothing).

    Seed and index alone decide the draw, so that an answer does not depend on the batch it rode in.
    """

    reals: Leaf
    ints: Leaf

    def of(self, name: str) -> Float[Array, " R"] | Int[Array, " R"]:
        """One column by its name."""
        return self.reals[:, _REALS.index(name)] if name in _REALS else self.ints[:, _INTS.index(name)]

    @property
    def program(self) -> str:
        """The least of the three programs that gives every row what it asks for. For arrays of the host."""
        if (self.ints[:, _SEAT] != NOT_SEATED).any() or (self.ints[:, _LOGPROBS] >= 0).any():
            return "sample"
        return "draw" if (self.reals[:, _TEMPERATURE] >= LEAST_TEMPERATURE).any() else "greedy"

    @staticmethod
    def shapes(requests: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of (reals, ints)."""
        return (requests, len(_REALS)), (requests, len(_INTS))

    @staticmethod
    def rows(params: SamplingParams, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(reals [6], ints [7]) of one request, made once; index and seat are put in for each pass. seed: 64 bits."""
        p = params
        reals = (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
        told = -1 if p.logprobs is None else p.logprobs
        words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
        return np.array(reals, np.float32), np.array([*words, 0, p.top_k, p.min_tokens, 0, told], np.int32)

    @staticmethod
    def stack(
        rows: Sequence[tuple[np.ndarray, np.ndarray]], index: Sequence[int], seat: Sequence[int], size: int
    ) -> "SampleArgs":
        """Arrays for `size` requests out of those given; the others are greedy and ignored."""
        of_reals, of_ints = SampleArgs.shapes(size)
        reals, ints = np.zeros(of_reals, np.float32), np.zeros(of_ints, np.int32)
        reals[:, [_TOP_P, _REPETITION]] = 1.0
        ints[:, _SEAT], ints[:, _LOGPROBS] = NOT_SEATED, -1
        if rows:
            here = slice(0, len(rows))
            reals[here], ints[here] = [r for r, _ in rows], [i for _, i in rows]
            ints[here, _INDEX], ints[here, _SEAT] = index, seat
        return SampleArgs(reals, ints)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seats:
    """What the device keeps of each request whose logits depend on more than the model; S seats, donated to each pass.

    tokens int32 [S, V]: bit 0: in the prompt; bit 1: ends the answer; the bits above: how often it was generated.
    bias float32 [S, V]: logit_bias.
    """

    tokens: Leaf
    bias: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Log-probabilities of N tokens: logprob float32 [N], and the best tokens in their place, best first, ties to the
    lowest id: ids int32 [N, 20] (-1 for none) and logprobs float32 [N, 20]. Columns that nobody asked for are -1."""

    logprob: Leaf
    ids: Leaf
    logprobs: Leaf

    def entry(self, row: int, count: int) -> TokenLogprobs:
        """What is told of one token; the arrays must be on the host."""
        top = zip(self.ids[row, :count].tolist(), self.logprobs[row, :count].tolist(), strict=True)
        return TokenLogprobs(_told(float(self.logprob[row])), tuple((i, _told(value)) for i, value in top if i >= 0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """tokens int32 [R], -1 for a row whose logits are not all finite or leave nothing to choose; and their scores: None
    from a program that does not tell any, without content where no row of the batch asked for them."""

    tokens: Leaf
    scores: Scores | None

    def on_host(self, *, told: bool = True) -> "Sampled":
        """A copy in host memory; without scores unless `told`."""
        return Sampled(np.asarray(self.tokens), jax.tree.map(np.asarray, self.scores) if told else self.scores)


def _told(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


@jax.named_scope("sample")
def greedy(logits: Float[Array, "R V"]) -> Sampled:
    """What `sample` gives where every row takes the largest logit and asks for nothing else."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return Sampled(jnp.where(jnp.isfinite(logits).all(-1), tokens, -1), None)


@jax.named_scope("sample")
def draw(logits: Float[Array, "R V"], args: SampleArgs, *, branch: bool) -> Sampled:
    """What `sample` gives where no row has a seat or asks for log-probabilities. branch: leave out what no row needs;
    a matter of speed alone."""
    largest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jnp.where(args.of("temperature") >= LEAST_TEMPERATURE, _drawn(logits, args, branch=branch), largest)
    return Sampled(jnp.where(jnp.isfinite(logits).all(-1), drawn, -1), None)


@jax.named_scope("sample")
def sample(logits: Float[Array, "R V"], args: SampleArgs, seats: Seats) -> tuple[Sampled, Seats]:
    """The next token of each row, and the seats with it counted."""
    raw, held = logits, seats.tokens.shape[0]
    logits = lax.cond(jnp.any(args.of("seat") < held), lambda: _adjusted(raw, args, seats), lambda: raw)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = args.of("temperature") >= LEAST_TEMPERATURE
    drawn = partial(_drawn, logits, args, branch=True)
    tokens = lax.cond(jnp.any(warm), lambda: jnp.where(warm, drawn(), greedy), lambda: greedy)
    best = jnp.take_along_axis(logits, greedy[:, None], axis=-1)[:, 0]
    tokens = jnp.where(jnp.isfinite(raw).all(-1) & (best > -jnp.inf), tokens, -1)
    told = jnp.max(args.of("logprobs"))
    scores = lax.cond(told >= 0, lambda: score(raw, tokens, told), lambda: _no_scores(raw.shape[0]))
    counted = jnp.where(tokens < 0, raw.shape[1], tokens)
    counts = seats.tokens.at[args.of("seat"), counted].add(_ONCE, mode="drop")
    return Sampled(tokens, scores), Seats(counts, seats.bias)


# -- the last token of each seat


def last_tokens(latest: Int[Array, " S"], seats: Int[Array, " R"]) -> Int[Array, " R"]:
    """The last token of these seats. A token of -1 says that the logits were not finite; its request ends, but the pass
    needs some id."""
    return jnp.maximum(jnp.take(latest, seats, mode="clip"), 0)


def keep_tokens(latest: Int[Array, " S"], seats: Int[Array, " R"], tokens: Int[Array, " R"]) -> Int[Array, " S"]:
    """`latest` with the tokens in these seats; a seat past the last drops its token."""
    return latest.at[seats].set(tokens, mode="drop")


# -- what a request adds to the model's logits


def seat_entries(
    params: SamplingParams, prompt: Iterable[int], generated: Iterable[int], ends: frozenset[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, tokens, bias): the columns of a request's seat that are not zero. ends: ids that end its answer."""
    entries: dict[int, int] = {}
    if params.repetition_penalty != 1.0:
        entries = dict.fromkeys(prompt, _IN_PROMPT)
    for token in generated:
        entries[token] = entries.get(token, 0) + _ONCE
    if params.min_tokens:
        for token in ends:
            entries[token] = entries.get(token, 0) | _ENDS_ANSWER
    bias = dict(params.logit_bias)
    ids = sorted({*entries, *bias})
    tokens = np.array([entries.get(i, 0) for i in ids], np.int32)
    return np.array(ids, np.int32), tokens, np.array([bias.get(i, 0.0) for i in ids], np.float32)


def fill_seat(
    seats: Seats,
    seat: Int[Array, ""],
    clear: Bool[Array, ""],
    ids: Int[Array, " C"],
    tokens: Int[Array, " C"],
    bias: Float[Array, " C"],
) -> Seats:
    """Writes C columns of one seat, after clearing it if `clear`; ids past the vocabulary are padding."""

    def filled(table: Array, values: Array) -> Array:
        row = jnp.where(clear, 0, table[seat]).at[ids].set(values, mode="drop")
        return table.at[seat].set(row)

    return Seats(filled(seats.tokens, tokens), filled(seats.bias, bias))


def _adjusted(logits: Float[Array, "R V"], args: SampleArgs, seats: Seats) -> Float[Array, "R V"]:
    """Bias, min_tokens and penalties, as Hugging Face and vLLM define them: repetition over prompt and answer, the
    other two over the answer only."""
    seat = args.of("seat")
    has_seat = seat < seats.tokens.shape[0]
    kept = jnp.take(seats.tokens, seat, axis=0, mode="clip")
    count = kept >> 2
    x = logits + jnp.take(seats.bias, seat, axis=0, mode="clip")
    too_early = args.of("index") < args.of("min_tokens")
    x = jnp.where((kept & _ENDS_ANSWER > 0) & too_early[:, None], -jnp.inf, x)
    r = args.of("repetition")[:, None]
    x = jnp.where((kept & _IN_PROMPT > 0) | (count > 0), jnp.where(x > 0, x / r, x * r), x)
    x = x - args.of("frequency")[:, None] * count - args.of("presence")[:, None] * (count > 0)
    return jnp.where(has_seat[:, None], x, logits)


# -- drawing


def _drawn(logits: Float[Array, "R V"], args: SampleArgs, *, branch: bool) -> Int[Array, " R"]:
    """Gumbel-max over what the filters leave: noise is keyed by seed, index and token id."""
    scaled = logits / jnp.maximum(args.of("temperature"), LEAST_TEMPERATURE)[:, None]
    floor = _filtered(scaled, args.of("top_k"), args.of("top_p"), branch=branch)
    best = scaled.max(-1, keepdims=True)
    # A token is as likely as exp of its distance from the best one; a min_p of 0 has a distance of -inf.
    keep = (_order(scaled) >= floor[:, None]) & (scaled >= best + jnp.log(args.of("min_p"))[:, None])

    def noise(low: Array, high: Array, index: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]).astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), logits.shape[-1:])

    drawn = jax.vmap(noise)(args.of("seed_low"), args.of("seed_high"), args.of("index"))
    return jnp.argmax(jnp.where(keep, scaled, -jnp.inf) + drawn, axis=-1).astype(jnp.int32)


def _filtered(
    scaled: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], *, branch: bool
) -> UInt[Array, " R"]:
    """The least `_order` that top-k and then top-p keep. Equals of the last one that is kept all stay."""
    order = _order(scaled)
    everything = jnp.zeros(scaled.shape[0], jnp.uint32)

    def by_count() -> Array:
        floor = _largest(lambda tried: jnp.sum(order >= tried[:, None], axis=-1) >= top_k, everything)
        return jnp.where(top_k > 0, floor, everything)

    def by_mass() -> Array:
        """A token stays while those strictly above it have less than top_p of the mass; the best one always does."""
        weight = jnp.exp(scaled - scaled.max(-1, keepdims=True))
        weight = jnp.where(order >= floor_k[:, None], weight, 0.0)
        wanted = top_p * weight.sum(-1)
        floor = _largest(lambda tried: jnp.where(order >= tried[:, None], weight, 0.0).sum(-1) >= wanted, everything)
        return jnp.where(top_p < 1.0, jnp.minimum(floor, order.max(-1)), everything)

    def floor_of(asked: Array, found: Callable[[], Array]) -> Array:
        return lax.cond(asked, found, lambda: everything) if branch else found()

    floor_k = floor_of(jnp.any(top_k > 0), by_count)
    return jnp.maximum(floor_k, floor_of(jnp.any(top_p < 1.0), by_mass))


def _order(x: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Integers in the order of the numbers, equal for equal ones (both zeros too)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 0, bits | jnp.uint32(1 << 31), ~bits)


def _largest(holds: Callable[[Array], Array], zero: UInt[Array, " R"]) -> UInt[Array, " R"]:
    """The largest number of 32 bits for which `holds`, which is true up to some number and false above it."""

    def step(i: Array, best: Array) -> Array:
        tried = best | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, best)

    return lax.fori_loop(0, 32, step, zero)


# -- log-probabilities


def score(logits: Float[Array, "N V"], chosen: Int[Array, " N"], count: Int[Array, ""]) -> Scores:
    """Scores of the chosen tokens with `count` alternatives each. A chosen token among them has the same bits there:
    clients compare the two for equality to see whether a choice was the greedy one."""
    ids, logprobs = _empty_tops(logits.shape[0])
    total = jax.nn.logsumexp(logits, axis=-1)
    place = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def step(i: Array, found: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        ids, logprobs, value, at = found
        after = (logits < value[:, None]) | ((logits == value[:, None]) & (place > at[:, None]))
        masked = jnp.where(after, logits, -jnp.inf)
        at = jnp.argmax(masked, axis=-1).astype(jnp.int32)
        value = jnp.take_along_axis(masked, at[:, None], axis=-1)[:, 0]
        at = jnp.where(value > -jnp.inf, at, -1)
        return ids.at[:, i].set(at), logprobs.at[:, i].set(value - total), value, at

    start = (ids, logprobs, jnp.full(logits.shape[0], jnp.inf), jnp.full(logits.shape[0], -1, jnp.int32))
    ids, logprobs, _, _ = lax.fori_loop(0, jnp.minimum(count, MAX_LOGPROBS), step, start)
    value = jnp.take_along_axis(logits, jnp.maximum(chosen, 0)[:, None], axis=-1)[:, 0]
    return Scores(value - total, ids, logprobs)


def _empty_tops(rows: int) -> tuple[Array, Array]:
    return jnp.full((rows, MAX_LOGPROBS), -1, jnp.int32), jnp.full((rows, MAX_LOGPROBS), -1.0, jnp.float32)


def _no_scores(rows: int) -> Scores:
    return Scores(jnp.full(rows, -1.0, jnp.float32), *_empty_tops(rows))
