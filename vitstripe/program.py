"""One compiled unit of work: what warm-up, the ROCm checks and profiles read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Program:
    """A device program with everything that is needed to compile it ahead of time.

    name: unique in its package, e.g. "vision/1024".
    fn: the jitted function.
    args: pytree of jax.ShapeDtypeStruct with shardings: exactly what the run-time call passes.
    collectives: StableHLO collective -> how often it stands in the lowered program, e.g. {"all_gather": 1}.
        A loop body counts once.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    collectives: Mapping[str, int] = field(default_factory=dict)

    def lower(self) -> jax.stages.Lowered:
        return self.fn.lower(*self.args)  # pyright: ignore[reportFunctionMemberAccess]

    def compile(self) -> jax.stages.Compiled:
        """Compiles ahead of time. The result raises on another shape, dtype or sharding instead of compiling again."""
        return self.lower().compile()
