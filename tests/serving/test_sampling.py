"""Token choice on the device against its definition, restated in numpy with sorts and loops."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from serving.protocol import InvalidRequest, SamplingParams
from serving.sampling import NOT_SEATED, SampleArgs, Seats, draw, fill_seat, greedy, sample, score, seat_entries

V, SEATS = 37, 3
GREEDY = SamplingParams(1, temperature=0.0)
WARM = SamplingParams(1, temperature=1.0)


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(3).normal(size=(5, V)).astype(np.float32) * 3


def args_of(params, *, seeds=None, index=None, seats=None):
    """SampleArgs of some requests; seeds 0, 1, ... and no token generated yet unless told."""
    rows = len(params)
    made = [SampleArgs.rows(p, s) for p, s in zip(params, range(rows) if seeds is None else seeds, strict=True)]
    return SampleArgs.stack(made, [0] * rows if index is None else index, seats or [NOT_SEATED] * rows, rows)


def empty_seats():
    return Seats(np.zeros((SEATS, V), np.int32), np.zeros((SEATS, V), np.float32))


def run(logits, args, seats=None):
    return jax.tree.map(np.asarray, jax.jit(sample)(logits, args, seats or empty_seats()))


def tokens_of(logits, params, **other):
    return run(logits, args_of(params, **other))[0].tokens


def draws(row, params, count=4000):
    """Tokens that `count` seeds draw from one row of logits."""
    return tokens_of(np.tile(row, (count, 1)), [params] * count)


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def survivors(row, params):
    """The definition: top-k, then top-p of what is left, then min-p; equals of the last one stay."""
    scaled = row / np.float32(params.temperature)
    keep = np.ones(V, bool)
    if params.top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(params.top_k, V) - 1]
    p = softmax(np.where(keep, scaled, -np.inf))
    if params.top_p < 1:
        keep &= np.array([p[p > p[i]].sum() < params.top_p or p[i] == p.max() for i in range(V)])
    return set(np.flatnonzero(keep & (p >= params.min_p * p.max())).tolist())


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_id_of_equals(logits):
    tied = logits.copy()
    tied[2, [9, 30]] = tied[2].max() + 1
    tokens = tokens_of(tied, [GREEDY] * 5)
    np.testing.assert_array_equal(tokens, tied.argmax(-1))
    assert tokens[2] == 9


def test_a_greedy_batch_runs_no_filter_and_draws_no_noise():
    """What costs a pass over the vocabulary lies in a branch of a conditional, which only runs for who needs it."""
    closed = jax.make_jaxpr(sample)(np.zeros((4, V), np.float32), args_of([GREEDY] * 4), empty_seats())

    def outside(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name != "cond" and inner is not None:
                yield from outside(inner.jaxpr)

    always = set(outside(closed.jaxpr))
    assert {"cond", "argmax"} <= always
    assert not always & {"sort", "top_k", "while", "scan", "exp", "log", "random_bits", "threefry2x32"}
    assert "sort[" not in str(closed)


def test_the_program_of_greedy_batches_gives_what_the_other_one_gives(logits):
    poisoned = logits.copy()
    poisoned[1, 3] = np.nan
    poisoned[2, [9, 30]] = poisoned[2].max() + 1
    args = args_of([GREEDY] * 5)
    expected, _ = run(poisoned, args)
    np.testing.assert_array_equal(np.asarray(jax.jit(greedy)(poisoned).tokens), expected.tokens)


@pytest.mark.parametrize("branch", [True, False])
def test_the_program_that_only_draws_gives_what_the_other_one_gives(logits, branch):
    params = [GREEDY, WARM, replace(WARM, top_k=4), replace(WARM, top_p=0.6, temperature=0.8), replace(WARM, min_p=0.2)]
    rows = np.tile(logits, (40, 1))
    rows[7, 3] = np.nan
    args = args_of(params * 40, index=list(range(200)))
    drawn = np.asarray(jax.jit(draw, static_argnames="branch")(rows, args, branch=branch).tokens)
    np.testing.assert_array_equal(drawn, run(rows, args)[0].tokens)
    assert drawn[7] == -1
    assert len(set(drawn[1::5].tolist())) > 5


@pytest.mark.parametrize("asks", [GREEDY, WARM])
def test_without_a_branch_there_is_no_conditional_and_no_loop_of_unknown_length(logits, asks):
    jaxpr = str(jax.make_jaxpr(partial(draw, branch=False))(logits, args_of([asks] * 5)))
    assert "cond[" not in jaxpr
    assert "while[" not in jaxpr


def test_the_host_picks_the_least_program_that_serves_all_rows():
    assert args_of([GREEDY] * 2).program == "greedy"
    assert args_of([GREEDY, WARM]).program == "draw"
    assert args_of([GREEDY, replace(WARM, top_k=3, top_p=0.5, min_p=0.1)]).program == "draw"
    for other in (GREEDY, WARM):
        assert args_of([other, replace(GREEDY, logprobs=0)]).program == "sample"
        assert args_of([other] * 2, seats=[NOT_SEATED, 2]).program == "sample"


def test_draws_follow_the_softmax(logits):
    observed = np.bincount(draws(logits[0], SamplingParams(1, temperature=1.5)), minlength=V) / 4000
    assert np.abs(observed - softmax(logits[0] / 1.5)).max() < 4 * np.sqrt(0.25 / 4000)


def test_draws_among_the_survivors_keep_their_proportions(logits):
    params = SamplingParams(1, temperature=1.3, top_k=11, top_p=0.9, min_p=0.02)
    kept = sorted(survivors(logits[0], params))
    expected = softmax(logits[0][kept] / np.float32(1.3))
    observed = np.bincount(draws(logits[0], params), minlength=V)
    assert observed[kept].sum() == 4000
    # Pearson's statistic against its 99.9 % quantile, approximated (Wilson and Hilferty 1931).
    chi2, freedom = ((observed[kept] - 4000 * expected) ** 2 / (4000 * expected)).sum(), len(kept) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < limit, (chi2, limit)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.7},
        {"top_p": 0.0},
        {"top_p": 0.999999},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 5000},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.8},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
    ],
)
def test_filters_keep_exactly_what_their_definition_keeps(logits, filters):
    params = replace(WARM, **{"temperature": 1.2} | filters)
    for row in logits[:2]:
        kept = survivors(row, params)
        # Rare ones may not come up in so few draws; what does come up must be among the survivors.
        seen = set(draws(row, replace(params, seed=None), 1500).tolist())
        likely = {i for i in kept if softmax(row / np.float32(params.temperature))[i] > 0.01}
        assert likely <= seen <= kept


def test_top_p_is_of_what_top_k_left_and_min_p_is_last():
    """The two published orders differ on this distribution: joint top-p keeps a third token, min-p first two only."""
    row = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))
    row = np.concatenate([row, np.full(V - 5, -60, np.float32)])
    assert set(draws(row, replace(WARM, top_k=3, top_p=0.8), 500).tolist()) == {0, 1}
    assert set(draws(row, replace(WARM, top_p=0.8, min_p=0.25), 500).tolist()) == {0, 1, 2}


def test_equals_at_the_edge_of_a_filter_all_stay():
    row = np.full(V, -5.0, np.float32)
    row[[3, 11, 12, 30]] = 2.0
    row[5] = 4.0
    assert set(draws(row, replace(WARM, top_k=2), 500).tolist()) == {3, 5, 11, 12, 30}
    row[[3, 11]] = [0.0, -0.0]  # equal, though their bits differ
    row[[5, 12, 30]] = -9.0
    assert set(draws(row, replace(WARM, top_k=1), 100).tolist()) == {3, 11}


def test_rows_with_different_wishes_do_not_disturb_each_other(logits):
    params = [
        GREEDY,
        WARM,
        replace(WARM, top_k=4),
        replace(WARM, top_p=0.6, temperature=0.8, logprobs=3),
        replace(WARM, min_p=0.2),
    ]
    index = [0, 3, 9, 1, 2]
    together = tokens_of(logits, params, seeds=[5, 6, 7, 8, 2**63 + 9], index=index)
    for row, seed in enumerate([5, 6, 7, 8, 2**63 + 9]):
        alone = tokens_of(logits[row : row + 1], [params[row]], seeds=[seed], index=index[row : row + 1])
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()


def test_both_words_of_a_seed_and_the_index_change_the_draw(logits):
    flat = np.zeros((1, 4096), np.float32)
    seats = Seats(np.zeros((1, 4096), np.int32), np.zeros((1, 4096), np.float32))
    drawn = {
        int(run(flat, args_of([WARM], seeds=[seed], index=[index]), seats)[0].tokens[0])
        for seed, index in ((1, 0), (2, 0), (1 + 2**32, 0), (1, 1), (-1, 0))
    }
    assert len(drawn) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_minus_one_and_leaves_the_others(logits, temperature, poison):
    poisoned = logits.copy()
    poisoned[3, 7] = poison
    params = [SamplingParams(1, temperature=temperature, top_p=0.9)] * 5
    clean, tokens = tokens_of(logits, params), tokens_of(poisoned, params)
    assert tokens[3] == -1
    np.testing.assert_array_equal(np.delete(tokens, 3), np.delete(clean, 3))


# -- penalties, bias, min_tokens


def seated(params, prompt, generated, ends=frozenset(), seat=1):
    """Seats of which one belongs to this request, filled in two parts, and was another's before."""
    seats = Seats(np.full((SEATS, V), 4 * 9 + 3, np.int32), np.full((SEATS, V), 7.0, np.float32))
    ids, tokens, bias = seat_entries(params, prompt, generated, ends)
    half = -(-len(ids) // 2)
    for start in (0, half):
        part = slice(start, start + half)
        pad = (0, 30 - len(ids[part]))
        columns = (np.pad(ids[part], pad, constant_values=V), np.pad(tokens[part], pad), np.pad(bias[part], pad))
        seats = jax.jit(fill_seat)(seats, np.int32(seat), np.bool_(start == 0), *columns)
    return jax.tree.map(np.asarray, seats)


def adjusted(row, params, prompt, generated, ends=frozenset()):
    """The definition, token by token."""
    out = row.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        out[token] += bias
    if len(generated) < params.min_tokens:
        out[list(ends)] = -np.inf
    for token in range(V):
        count = generated.count(token)
        if token in prompt or count:
            r = params.repetition_penalty
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
        out[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return out


PROMPT, ANSWER, ENDS = [3, 4, 4, 36, 0], [9, 3, 9, 9], frozenset({2, 30})


@pytest.mark.parametrize(
    "wishes",
    [
        {"repetition_penalty": 1.25},
        {"repetition_penalty": 0.01, "min_tokens": 5},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25},
        {"presence_penalty": -2.0},
        {"logit_bias": ((9, -100.0), (30, 12.5))},
        {"min_tokens": 5},
        {
            "repetition_penalty": 1.5,
            "frequency_penalty": -1.0,
            "presence_penalty": 1.0,
            "logit_bias": ((30, 20.0), (36, 9.0)),
            "min_tokens": 9,
        },
    ],
)
def test_penalties_bias_and_min_tokens_follow_their_definition(logits, wishes):
    params = SamplingParams(9, temperature=0.0, logprobs=2, **wishes)
    index = [len(ANSWER)]
    seats = seated(params, PROMPT, ANSWER, ENDS)
    for row in range(5):
        for favourite in (9, 3, 4, 2, 30):  # tokens that what is asked for changes
            x = logits[row].copy()
            x[favourite] = x.max() + 0.6
            expected = adjusted(x, params, PROMPT, ANSWER, ENDS)
            sampled, after = run(x[None], args_of([params], index=index, seats=[1]), seats)
            assert sampled.tokens[0] == expected.argmax()
            # What is told is the model's own opinion, whatever was asked for.
            own = np.log(softmax(x))
            np.testing.assert_allclose(sampled.scores.logprob[0], own[sampled.tokens[0]], atol=1e-5)
            assert sampled.scores.ids[0, 0] == x.argmax()
            # The token counts from the next step on.
            np.testing.assert_array_equal(
                after.tokens - seats.tokens,
                4 * (np.arange(SEATS)[:, None] == 1) * (np.arange(V) == sampled.tokens[0]),
            )


def test_adjusted_rows_are_drawn_from_the_adjusted_distribution(logits):
    params = SamplingParams(1, temperature=1.1, frequency_penalty=1.5, presence_penalty=0.5)
    seats, count = seated(params, PROMPT, ANSWER), 4000
    args = args_of([params] * count, index=[len(ANSWER)] * count, seats=[1] * count)
    observed = np.bincount(run(np.tile(logits[1], (count, 1)), args, seats)[0].tokens, minlength=V) / count
    expected = softmax(adjusted(logits[1], params, PROMPT, ANSWER) / 1.1)
    assert np.abs(observed - expected).max() < 4 * np.sqrt(0.25 / count)


def test_min_tokens_ends_when_they_are_there(logits):
    params = SamplingParams(9, temperature=0.0, min_tokens=4)
    x = logits[:1].copy()
    x[0, 2] = 50.0
    seats = seated(params, PROMPT, [], ENDS)
    chosen = [int(run(x, args_of([params], index=[i], seats=[1]), seats)[0].tokens[0]) for i in (0, 3, 4)]
    assert chosen == [adjusted(x[0], params, PROMPT, [], ENDS).argmax()] * 2 + [2]


def test_a_row_left_with_no_token_gives_minus_one_and_leaves_the_others(logits):
    params = SamplingParams(9, temperature=1.0, min_tokens=4)
    seats = seated(params, PROMPT, [], frozenset(range(V)))
    tokens = run(logits[:2], args_of([params, GREEDY], seats=[1, NOT_SEATED]), seats)[0].tokens
    assert tokens.tolist() == [-1, logits[1].argmax()]


def test_a_row_without_a_seat_is_untouched_and_counts_nowhere(logits):
    biased = SamplingParams(9, temperature=0.0, logit_bias=((8, 100.0),))
    seats = seated(biased, PROMPT, [])
    sampled, after = run(logits[:2], args_of([biased, GREEDY], seats=[1, NOT_SEATED]), seats)
    assert sampled.tokens.tolist() == [8, logits[1].argmax()]
    assert (after.tokens - seats.tokens).sum() == 4


# -- log-probabilities


def test_scores_are_the_log_softmax_and_its_best_in_order(logits):
    tied = logits.copy()
    tied[0, [30, 9]] = tied[0].max() + 1
    chosen = np.array([9, 1, 36, 0, 7], np.int32)
    scores = jax.tree.map(np.asarray, jax.jit(score)(tied, chosen, np.int32(5)))
    for row in range(5):
        expected = np.log(softmax(tied[row]))
        order = np.argsort(-tied[row], kind="stable")
        np.testing.assert_allclose(scores.logprob[row], expected[chosen[row]], atol=2e-6)
        np.testing.assert_array_equal(scores.ids[row], [*order[:5], *[-1] * 15])
        np.testing.assert_allclose(scores.logprobs[row, :5], expected[order[:5]], atol=2e-6)
    assert scores.ids[0, :2].tolist() == [9, 30]


def test_a_chosen_token_has_the_very_value_it_has_among_the_best(logits):
    """lm-eval calls a continuation greedy where the two are equal, not close."""
    chosen = logits.argmax(-1).astype(np.int32)
    scores = jax.tree.map(np.asarray, jax.jit(score)(logits, chosen, np.int32(1)))
    np.testing.assert_array_equal(scores.logprob, scores.logprobs[:, 0])
    entry = scores.entry(2, 1)
    assert entry.top == ((chosen[2], entry.logprob),)


def test_more_alternatives_than_there_are_tokens_leaves_the_rest_out():
    few = np.array([[0.5, -0.5, 2.0]], np.float32)
    scores = jax.tree.map(np.asarray, jax.jit(score)(few, np.array([1], np.int32), np.int32(20)))
    assert [token for token, _ in scores.entry(0, 20).top] == [2, 0, 1]


def test_a_probability_of_zero_is_told_as_a_number_that_json_has():
    row = np.array([[0.0, -3e38, 1.0]], np.float32)
    scores = jax.tree.map(np.asarray, jax.jit(score)(row, np.array([1], np.int32), np.int32(3)))
    assert scores.entry(0, 3).logprob == -9999.0


def test_scores_come_with_every_way_of_drawing_and_only_when_asked_for(logits):
    asked = args_of([replace(GREEDY, logprobs=0), replace(WARM, logprobs=2), GREEDY, WARM, WARM])
    sampled, _ = run(logits, asked)
    for row in range(2):
        np.testing.assert_allclose(
            sampled.scores.logprob[row], np.log(softmax(logits[row]))[sampled.tokens[row]], atol=2e-6
        )
    assert len(sampled.scores.entry(1, 2).top) == 2
    nobody, _ = run(logits, args_of([GREEDY] * 5))
    assert (nobody.scores.ids == -1).all()


# -- what may be asked for


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": -0.1},
        {"min_p": 1.5},
        {"top_k": -2},
        {"top_k": 1 << 31},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("inf")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 2.5},
        {"logit_bias": ((5, 101.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"min_tokens": 8},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"seed": 2**63},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    [field] = wrong
    with pytest.raises(InvalidRequest, match=f"^{field} "):
        SamplingParams(**{"max_tokens": 7} | wrong)
