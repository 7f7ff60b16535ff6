"""The compiled programs of a training: gradients and scores for each of the miniature's programs, one update."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from scripts.lib.miniature.optimizer import Optimizer
from scripts.lib.miniature.spec import Miniature, Scores
from scripts.lib.miniature.weights import Params, Weights

_COMPILERS = 6


class Programs:
    """Compiled ahead, several at once and beside the first steps of training: waiting for all of them in turn would
    take a good part of the minutes."""

    def __init__(
        self,
        miniature: Miniature,
        weights: Weights,
        optimizer: Optimizer,
        say: Callable[[str], None] = lambda text: None,
    ):
        self._miniature, self._weights, self._optimizer = miniature, weights, optimizer
        self._say = say
        self._threads = ThreadPoolExecutor(_COMPILERS)
        self._compiled: dict[tuple[str, str], Future[Any]] = {}
        params = weights.shapes()
        state = jax.eval_shape(optimizer.init, params)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        update = jax.jit(optimizer.update, donate_argnums=(0, 1))
        self._update = self._threads.submit(self._compile, "update", update, (params, state, params, rate))

    def prepare(self, kind: str, program: str) -> Future[Any]:
        """Begins to compile `program`, for "gradients" or "scores", unless that was begun before."""
        key = (kind, program)
        if key not in self._compiled:
            function = self._gradients if kind == "gradients" else self._scores
            arguments = (self._weights.shapes(), dict(self._miniature.shapes(program)))
            traced = jax.jit(lambda params, batch: function(params, batch, program))
            self._compiled[key] = self._threads.submit(self._compile, f"{kind} {program}", traced, arguments)
        return self._compiled[key]

    def _compile(self, name: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        began = time.monotonic()
        lowered = function.lower(*arguments)
        traced = time.monotonic()
        compiled = lowered.compile()
        self._say(f"{name}: traced in {traced - began:.1f} s, compiled in {time.monotonic() - traced:.1f} s")
        return compiled

    def wait(self, program: str) -> None:
        """Until a step with `program` can be made."""
        self.prepare("gradients", program).result()
        self._update.result()

    def gradients(self, params: Params, batch: Mapping[str, jax.Array], program: str) -> tuple[Params, Scores]:
        return self.prepare("gradients", program).result()(params, batch)

    def scores(self, params: Params, batch: Mapping[str, jax.Array], program: str) -> Scores:
        return self.prepare("scores", program).result()(params, batch)

    def update(self, params: Params, state: Any, gradients: Params, rate: float) -> tuple[Params, Any]:
        """The parameters and the state are consumed."""
        return self._update.result()(params, state, gradients, jnp.float32(rate))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _scores(self, params: Params, batch: Mapping[str, jax.Array], program: str) -> Scores:
        return self._miniature.score(self._weights.modules(params), batch, program)

    def _gradients(self, params: Params, batch: Mapping[str, jax.Array], program: str) -> tuple[Params, Scores]:
        def loss(params: Params) -> tuple[jax.Array, Scores]:
            scores = self._scores(params, batch, program)
            return scores.loss, scores

        gradients, scores = jax.grad(loss, has_aux=True)(params)
        return gradients, scores
