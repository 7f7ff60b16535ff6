"""Meshes: the right devices, and errors that say what to do."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from vitstripe import make_mesh, require_auto_axis


@pytest.mark.multidevice
def test_a_mesh_has_one_auto_axis_over_the_first_devices():
    mesh = make_mesh(3)
    assert mesh.axis_names == ("tp",)
    assert mesh.axis_types == (AxisType.Auto,)
    assert list(mesh.devices) == jax.devices()[:3]


def test_the_devices_and_the_axis_name_can_be_chosen():
    chosen = jax.devices()[5:7]
    mesh = make_mesh(2, axis="stripe", devices=chosen)
    assert list(mesh.devices) == chosen
    assert require_auto_axis(mesh, "stripe") == 2


def test_too_few_devices_is_an_error_that_names_both_numbers_and_the_remedy():
    with pytest.raises(ValueError, match=r"tp is 9 but only 8 cpu device\(s\) exist; .*jax_num_cpu_devices=9"):
        make_mesh(9)


@pytest.mark.parametrize("tp", [0, -2])
def test_a_mesh_needs_at_least_one_device(tp):
    with pytest.raises(ValueError, match=f"tp is {tp}; it must be at least 1"):
        make_mesh(tp)


def test_an_explicit_axis_is_refused_with_a_text_that_says_so():
    explicit = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with pytest.raises(
        ValueError, match=r"axis 'tp' is Explicit; pass axis_types=.*AxisType.Auto.*vitstripe.make_mesh"
    ):
        require_auto_axis(explicit, "tp")


def test_a_missing_axis_is_an_error_that_lists_the_axes():
    with pytest.raises(ValueError, match=r"axes \('tp',\), none is named 'model'"):
        require_auto_axis(make_mesh(2), "model")


def test_an_abstract_mesh_is_checked_alike():
    assert require_auto_axis(AbstractMesh((4,), ("tp",), axis_types=(AxisType.Auto,)), "tp") == 4
