"""Ownership arithmetic: every row has one owner, and small stripes balance."""

import numpy as np
import pytest

from dsa_indexer import StripeConfig, engages
from dsa_indexer.stripes import imbalance, owner, pairs_per_device, rounds

MANY_M = (0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 511, 512, 513, 2000, 9000, 32768)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("S", [1, 32, 64, 512])
def test_devices_hold_each_row_once_in_whole_stripes(S, tp):
    for M in MANY_M:
        owners = owner(np.arange(M), S, tp)
        assert ((owners >= 0) & (owners < tp)).all()
        for i in range(0, M, S):
            assert (owners[i : i + S] == (i // S) % tp).all()
        most = np.bincount(owners, minlength=1).max() if M else 0
        assert most <= rounds(M, S, tp) * S
        assert rounds(M, S, tp) * S * tp - M < S * tp


@pytest.mark.parametrize(
    ("M", "prefix", "tp", "S", "want"),
    [
        (8192, 0, 2, 128, 1.016),
        (8192, 0, 8, 512, 1.437),
        (8192, 0, 8, 1024, 1.875),
        (32768, 0, 8, 512, 1.109),
        (50000, 0, 4, 1024, 1.041),
        (50000, 0, 8, 512, 1.058),
        (8192, 32768, 8, 512, 1.049),
        (50000, 32768, 8, 1024, 1.108),
        (17232, 32768, 8, 512, 1.184),
        (50000, 131072, 4, 512, 1.023),
        (131072, 131072, 8, 512, 1.009),
    ],
)
def test_the_busiest_device_of_one_request_does_this_much_over_the_mean(M, prefix, tp, S, want):
    assert imbalance(prefix + np.arange(1, M + 1), S, tp) == pytest.approx(want, abs=6e-4)


def test_the_balance_has_a_closed_form_when_stripes_fill_the_rows():
    M, prefix, tp, S = 4800, 1000, 4, 48
    want = 1 + (tp - 1) * S / (2 * prefix + M + 1)
    assert imbalance(prefix + np.arange(1, M + 1), S, tp) == pytest.approx(want, rel=1e-12)


FOUR_OF_8192 = np.tile(np.arange(1, 8193), 4)


@pytest.mark.parametrize(("S", "want"), [(64, 1.055), (128, 1.109), (256, 1.219), (512, 1.437), (1024, 1.875)])
def test_small_stripes_balance_packed_requests(S, want):
    assert imbalance(FOUR_OF_8192, S, 8) == pytest.approx(want, abs=6e-4)


def _pairs_by_mask(lengths: np.ndarray, S: int, tp: int) -> list[int]:
    """Row by row, without any of the arithmetic under test."""
    pairs = [0] * tp
    for m, length in enumerate(lengths.tolist()):
        pairs[m // S % tp] += length
    return pairs


@pytest.mark.parametrize("lengths", [np.arange(1, 8193), FOUR_OF_8192], ids=["8192 rows", "four requests of 8192"])
def test_stripes_of_64_balance_8_devices_within_6_percent_where_contiguous_blocks_do_not(lengths):
    pairs = _pairs_by_mask(lengths, 64, 8)
    assert pairs_per_device(lengths, 64, 8).tolist() == pairs
    assert sum(pairs) == lengths.sum()
    assert max(pairs) / np.mean(pairs) <= 1.06
    blocks = [block.sum() for block in np.split(lengths, 8)]
    assert max(blocks) / np.mean(blocks) > 1.45
    # Contiguous blocks are stripes of M / tp rows.
    assert pairs_per_device(lengths, len(lengths) // 8, 8).tolist() == blocks


def test_pairs_are_counted_past_the_integers_that_a_float_holds():
    lengths = np.array([2**53, 1, 2**53, 1, -5])
    assert pairs_per_device(lengths, 1, 2).tolist() == [2**54, 2]


def test_no_work_is_balanced():
    assert imbalance(np.zeros(7), 2, 4) == 1.0


@pytest.mark.parametrize(
    ("num_rows", "tp", "mean_keys", "least", "engaged", "says"),
    [
        (1000, 1, 9000.0, 0, False, "one device"),
        (7, 8, 9000.0, 0, False, "7 row(s) for 8 devices"),
        (8, 8, 0.0, 0, True, "8 rows"),
        (1000, 8, 4095.9, 4096, False, "below min_mean_keys = 4096"),
        (1000, 8, 4096.0, 4096, True, "1000 rows of 4096 keys"),
        (0, 2, 0.0, 0, False, "0 row(s)"),
    ],
)
def test_striping_engages_only_where_it_can_pay(num_rows, tp, mean_keys, least, engaged, says):
    decision, reason = engages(num_rows, tp, mean_keys, StripeConfig(min_mean_keys=least))
    assert decision is engaged
    assert says in reason
