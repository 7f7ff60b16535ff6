"""The bounded test of the exact collective: right values pass, wrong ones and a hang are told."""

import threading

import jax.numpy as jnp
import pytest
from jax import lax

from vitstripe import selftest
from vitstripe.selftest import CollectiveHang, CollectiveWrong, bounded, check_all_gather, check_pmax

pytestmark = pytest.mark.multidevice


@pytest.mark.parametrize(("tp", "rows", "width"), [(2, 1, 7), (4, 33, 12), (8, 5, 3)])
def test_the_exact_maximum_passes_on_every_mesh(mesh_of, tp, rows, width):
    assert check_pmax(mesh_of(tp), rows=rows, width=width) > 0


def test_a_maximum_that_is_a_sum_is_found_wrong_on_a_named_device(mesh_of, monkeypatch):
    monkeypatch.setattr(selftest.lax, "pmax", lambda x, axis: lax.psum(x, axis))
    with pytest.raises(CollectiveWrong, match=r"int32 maximum of 6 x 5 over 2 devices.* is wrong in \d of 6 rows on"):
        check_pmax(mesh_of(2), rows=6, width=5)


def test_rows_gathered_in_another_order_are_found_on_a_named_device(mesh_of, monkeypatch):
    check_all_gather(mesh_of(4), rows=5, width=7)
    right = lax.all_gather
    monkeypatch.setattr(selftest.lax, "all_gather", lambda x, axis, tiled: right(x, axis, tiled=tiled)[::-1])
    with pytest.raises(CollectiveWrong, match=r"gathering of 3 x 7 from each of 2 devices.* is wrong in 6 rows on"):
        check_all_gather(mesh_of(2), rows=3, width=7)


def test_what_hangs_is_told_within_the_limit_with_the_usual_causes():
    release = threading.Event()
    with pytest.raises(CollectiveHang, match=r"the maximum did not end within 0\.05 s.*--shm-size"):
        bounded(release.wait, 0.05, "the maximum")
    release.set()


def test_a_result_and_an_error_of_the_tested_thread_reach_the_caller():
    assert bounded(lambda: int(jnp.arange(4).sum()), 30.0, "a sum") == 6
    with pytest.raises(KeyError):
        bounded(lambda: {}["missing"], 30.0, "a look-up")
