"""Orbax checkpoints of a training: everything that the next step depends on."""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from scripts.lib.miniature.weights import Params


class Saves:
    """Folders `<step>` under `folder`, the newest kept. Batches depend on their index alone, so parameters, optimizer
    state and step are all there is."""

    def __init__(self, folder: Path):
        self._folder = folder.absolute()

    def newest(self) -> int | None:
        steps = [int(path.name) for path in self._folder.glob("*") if path.name.isdigit()]
        return max(steps, default=None)

    def save(self, step: int, params: Params, state: Any) -> None:
        with ocp.StandardCheckpointer() as writer:
            writer.save(self._folder / str(step), _saved(params, state), force=True)
        for path in self._folder.glob("*"):
            if path.name.isdigit() and int(path.name) < step:
                shutil.rmtree(path)

    def restore(self, step: int, params: Any, state: Any) -> tuple[Params, Any]:
        """params, state: ShapeDtypeStructs of what was saved. Raises ValueError where they do not fit."""
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), _saved(params, state)
        )
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(self._folder / str(step), wanted)
        leaves = [found["state"][f"{i:04}"] for i in range(len(found["state"]))]
        return found["params"], jax.tree.unflatten(jax.tree.structure(state), leaves)


def _saved(params: Any, state: Any) -> dict[str, Any]:
    # The optimizer's state nests tuples of its own types; its leaves in order are enough to put it together again.
    return {"params": params, "state": {f"{i:04}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}}
