"""Device meshes. Every function that needs one takes it as an argument; nothing here keeps state."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(tp: int, axis: str = "tp", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh of `tp` devices with an Auto axis.

    Raises ValueError when fewer than `tp` devices exist.
    """
    found = list(jax.devices() if devices is None else devices)
    if tp < 1:
        raise ValueError(f"tp is {tp}; it must be at least 1")
    if len(found) < tp:
        raise ValueError(
            f"tp is {tp} but only {len(found)} {found[0].platform} device(s) exist; lower tp, or on a CPU "
            f"set jax_num_cpu_devices={tp} before the first computation"
        )
    return Mesh(np.array(found[:tp]), (axis,), axis_types=(AxisType.Auto,))


def require_auto_axis(mesh: Mesh | jax.sharding.AbstractMesh, axis: str) -> int:
    """The size of mesh axis `axis`. Raises ValueError if it is missing or not Auto.

    `jax.make_mesh` makes Explicit axes unless told otherwise; shard_map programs here state their own
    shardings and want Auto.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"mesh has axes {mesh.axis_names}, none is named {axis!r}")
    kind = mesh.axis_types[mesh.axis_names.index(axis)]
    if kind != AxisType.Auto:
        raise ValueError(
            f"mesh axis {axis!r} is {kind.name}; pass axis_types=(jax.sharding.AxisType.Auto,) to "
            f"jax.make_mesh, or use vitstripe.make_mesh"
        )
    return mesh.shape[axis]
