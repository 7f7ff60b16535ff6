"""Collectives, tried with a time limit: the striped indexer's all-reduce of a maximum of int32, and the all-gather.

A collective that hangs would otherwise show as a start-up or a request that never ends. On a GPU it depends on links,
drivers and the library's shared memory, none of which jax looks at.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vitstripe.mesh import require_auto_axis

Result = TypeVar("Result")

DEFAULT_SECONDS = 120.0
"""Starting the collective library on eight GPUs takes tens of seconds the first time."""


class CollectiveHang(RuntimeError):  # noqa: N818  (named for what is wrong)
    """A collective did not end in time. The thread that runs it cannot be stopped: end the process with os._exit."""


class CollectiveWrong(RuntimeError):  # noqa: N818
    """A collective ended with other values than it should have."""


def bounded(run: Callable[[], Result], seconds: float, what: str) -> Result:
    """run() in a thread of its own, for `seconds` at most. Raises CollectiveHang naming `what`, or what run raises."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(run())
        except BaseException as error:  # handed to the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body, name="self-test", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CollectiveHang(
            f"{what} did not end within {seconds:g} s. Usual causes: /dev/shm too small for RCCL or NCCL (containers: "
            f"--shm-size=64g), GPUs that cannot reach each other's memory (try NCCL_P2P_DISABLE=1), or a GPU held by a "
            f"stuck process. `python -m serving doctor` looks at the first; NCCL_DEBUG=INFO shows the rest"
        )
    if errors:
        raise errors[0]
    return results[0]


def check_pmax(mesh: Mesh, *, rows: int, width: int, axis: str = "tp", seconds: float = DEFAULT_SECONDS) -> float:
    """Merges int32 [rows, width] over the mesh as the striped indexer does: row m is known to device m mod tp and -1 on
    the others. Compares every device's copy and returns the seconds of a second run.

    Raises CollectiveHang after `seconds`, CollectiveWrong naming the device, and ValueError for a mesh without `axis`.
    """
    tp = require_auto_axis(mesh, axis)
    what = f"the int32 maximum of {rows} x {width} over {tp} devices ({rows * width * 4 / 2**20:.3g} MiB)"
    split = NamedSharding(mesh, PartitionSpec(axis))

    def values() -> jax.Array:
        return jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)[:, ::-1] % 1_000_003

    def local(owner: jax.Array) -> jax.Array:
        mine = jnp.arange(rows) % tp == owner[0]
        return lax.pmax(jnp.where(mine[:, None], values(), -1), axis)

    merge = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(axis), out_specs=PartitionSpec()))

    def run() -> float:
        owners = jax.device_put(np.arange(tp, dtype=np.int32), split)
        merged = jax.block_until_ready(merge(owners))
        expected = np.arange(rows * width, dtype=np.int32).reshape(rows, width)[:, ::-1] % 1_000_003
        for shard in merged.addressable_shards:
            wrong = int((np.asarray(shard.data) != expected).any(-1).sum())
            if wrong:
                raise CollectiveWrong(
                    f"{what} is wrong in {wrong} of {rows} rows on {shard.device}; start with --no-indexer-stripes and "
                    f"report it"
                )
        begin = time.perf_counter()
        jax.block_until_ready(merge(owners))
        return time.perf_counter() - begin

    return bounded(run, seconds, what)


def check_all_gather(mesh: Mesh, *, rows: int, width: int, axis: str = "tp", seconds: float = DEFAULT_SECONDS) -> None:
    """Gathers float32 [rows, width] from each device, as an encoder's lanes are, and compares every device's copy.

    Raises as `check_pmax`.
    """
    tp = require_auto_axis(mesh, axis)
    what = f"the gathering of {rows} x {width} from each of {tp} devices ({tp * rows * width * 4 / 2**20:.3g} MiB)"
    values = np.arange(tp * rows * width, dtype=np.float32).reshape(tp * rows, width)
    # A gathered result counts as varying, which the checker would refuse.
    gather = jax.jit(
        jax.shard_map(
            lambda x: lax.all_gather(x, axis, tiled=True),
            mesh=mesh,
            in_specs=PartitionSpec(axis),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )

    def run() -> None:
        gathered = gather(jax.device_put(values, NamedSharding(mesh, PartitionSpec(axis))))
        for shard in gathered.addressable_shards:
            wrong = int((np.asarray(shard.data) != values).any(-1).sum())
            if wrong:
                raise CollectiveWrong(f"{what} is wrong in {wrong} rows on {shard.device}; report it")

    bounded(run, seconds, what)
