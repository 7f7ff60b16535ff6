"""One compiled unit of work: what warm-up, the ROCm checks and profiles read."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Program:
    """A device program with everything that is needed to compile it ahead of time.

    name: unique in its package, e.g. "vision/1024".
    fn: the jitted function.
    args: pytree of jax.ShapeDtypeStruct with shardings: exactly what the run-time call passes.
    collectives: StableHLO collective -> how often the lowered program runs it, e.g. {"all_gather": 1}, as
        `collectives_in` counts. A loop body counts once.
    options: XLA's compile options for this program alone.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    collectives: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def lower(self) -> jax.stages.Lowered:
        return self.fn.lower(*self.args)  # pyright: ignore[reportFunctionMemberAccess]

    def compile(self) -> jax.stages.Compiled:
        """Compiles ahead of time. The result raises on another shape, dtype or sharding instead of compiling again."""
        return self.lower().compile(compiler_options=dict(self.options) or None)


def zeros_of(abstract: Any) -> Any:
    """Zeros for a pytree of jax.ShapeDtypeStruct with shardings. Made on the devices: a cache can be gigabytes."""
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract), out_shardings=shardings)()


_SYMBOL = r'("[^"]+"|[\w.]+)'
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_permute")


def collectives_in(stablehlo: str) -> dict[str, int]:
    """Collectives of a lowered program's text: those of its main function and, once a call, of every function it calls
    (blocks that are lowered once are called once a layer)."""
    functions: dict[str, str] = {}
    for name, body in re.findall(rf"func\.func \w+ @{_SYMBOL}(.*?)(?=\n  func\.func |\Z)", stablehlo, re.DOTALL):
        functions[name] = body

    def count(name: str) -> Counter[str]:
        body = functions[name]
        total = Counter(re.findall(rf"stablehlo\.({'|'.join(COLLECTIVES)})\b", body))
        for callee in re.findall(rf"call @{_SYMBOL}", body):
            total += count(callee) if callee in functions else Counter()
        return total

    return dict(count("main"))
