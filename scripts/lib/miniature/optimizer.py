"""Muon for the matrices inside the layers, Adam for the rest, or AdamW for all."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from scripts.lib.miniature.spec import Recipe
from scripts.lib.miniature.weights import Params

_CLIP = 1.0
# Tables and the last layer are no maps between hidden states; Adam serves them better. The projection of patches is
# Muon's: Adam's steps of one size a weight add up over its hundreds of like inputs and drown what it has learnt.
_NO_MUON = ("embed_tokens", "pos_embed", "lm_head", "gate.weight")
_STACK = "stack:"


def _uses_muon(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and not any(name in path for name in _NO_MUON)


def _groups(shapes: Mapping[str, jax.ShapeDtypeStruct | jax.Array]) -> dict[str, list[str]]:
    """Muon's matrices of one shape, which are orthogonalised side by side: one at a time would be thousands of tiny
    launches a step. A stack of experts stays a group of its own."""
    groups: dict[str, list[str]] = {}
    for path, value in shapes.items():
        if _uses_muon(path, value.shape):
            name = "x".join(map(str, value.shape)) if len(value.shape) == 2 else path
            groups.setdefault(_STACK + name, []).append(path)
    return groups


def _stacked(tree: Mapping[str, jax.Array]) -> Params:
    groups = _groups(tree)
    inside = {path for paths in groups.values() for path in paths}
    whole = {path: value for path, value in tree.items() if path not in inside}
    for name, paths in groups.items():
        first = tree[paths[0]]
        whole[name] = first if first.ndim > 2 else jnp.stack([tree[path] for path in paths])
    return whole


def _unstacked(stacked: Mapping[str, jax.Array], like: Mapping[str, jax.Array]) -> Params:
    flat = dict(stacked)
    for name, paths in _groups(like).items():
        values = flat.pop(name)
        flat.update({paths[0]: values} if len(like[paths[0]].shape) > 2 else dict(zip(paths, values, strict=True)))
    return flat


class Optimizer:
    """Plain functions over Params, for use inside a program. The state is a pytree of arrays."""

    def __init__(self, recipe: Recipe):
        def is_matrix(tree):
            return {path: path.startswith(_STACK) for path in tree}

        if recipe.optimizer == "muon":
            dims = MuonDimensionNumbers((2,), (1,))
            descent = optax.contrib.muon(
                1.0,
                weight_decay=recipe.weight_decay,
                adam_b2=0.99,
                consistent_rms=recipe.matrix_rms,
                muon_weight_dimension_numbers=lambda tree: {
                    path: dims if path.startswith(_STACK) else None for path in tree
                },
            )
        else:
            descent = optax.adamw(1.0, b2=0.99, weight_decay=recipe.weight_decay, mask=is_matrix)
        self._transform = optax.chain(optax.clip_by_global_norm(_CLIP), descent)

    def init(self, params: Params):
        return self._transform.init(_stacked(params))

    def update(self, params: Params, state, gradients: Params, rate: jax.Array):
        """(new parameters, new state). rate: the learning rate of this step, a scalar."""
        steps, state = self._transform.update(_stacked(gradients), state, _stacked(params))
        steps = _unstacked(steps, params)
        return {path: value + rate * steps[path] for path, value in params.items()}, state


def rate_at(recipe: Recipe) -> Callable[[int, float], float]:
    """(step, progress from 0 to 1) -> learning rate: linear warm-up by steps, then a cosine over the progress,
    or the peak until `decay_from` and a straight line from there."""

    def rate(step: int, progress: float) -> float:
        warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
        if recipe.decay_from is None:
            fall = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        else:
            fall = min(1.0, (1 - min(1.0, progress)) / (1 - recipe.decay_from))
        return recipe.peak * warm * (recipe.floor + (1 - recipe.floor) * fall)

    return rate
