"""Times one decode pass and one prefill pass of a made-up model on this machine's device, by themselves.

The floor of a decode pass is what it must read, at the rate of a large copy; that of a prefill pass is its matrix
products and attention, at the rate of a large product. Both rates are measured in the same run.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from scripts.lib.bench_kernels import compiled, median_seconds, normal
from scripts.lib.made_up_model import SHAPES, random_state
from serving.config import ROW_TILE, EngineConfig
from serving.lm import LanguageModel, LmShapes
from serving.models import family_of
from serving.models.config import text_config
from serving.models.step import Step
from vitstripe.mesh import make_mesh
from vitstripe.platform import platform_of
from vitstripe.program import Program

GROUP, GROUPS = 4, 5  # passes a synchronisation; the median is taken over the groups


@dataclass(frozen=True)
class PassTime:
    """A pass of `rows` rows over `keys` keys a request. seconds: median; floor: seconds at the measured rates; work:
    bytes that a decode must move, operations that a prefill must do."""

    name: str
    rows: int
    keys: int
    seconds: float
    floor: float
    work: float

    @property
    def rate(self) -> float:
        return self.work / self.seconds


def place(values: Any, shapes: Any) -> Any:
    """A program's arguments, or some of them, on the devices where it takes them."""
    return jax.tree.map(lambda value, shape: jax.device_put(value, shape.sharding), values, shapes)


class Passes:
    """The programs of a shape on one device, with random weights and caches full of random keys."""

    def __init__(self, shape: str, mesh: Mesh, *, running: int, prefill_rows: int, length: int, image_rows: int = 0):
        """image_rows: of the pool that image tokens come from, 0 for text alone."""
        config = SHAPES[shape]
        dtype = platform_of(mesh.devices.flat[0]).default_dtype
        family = family_of(config)
        graphdef, abstract = nnx.split(nnx.eval_shape(lambda: family.build(config, mesh.size, dtype)))
        self.engine = EngineConfig(
            tp=mesh.size, max_model_len=length, max_seqs=running, prefill_tokens=max(prefill_rows, ROW_TILE)
        )
        pages = running * self.engine.pages_per_seq
        width = text_config(config)["hidden_size"] * (1 + nnx.merge(graphdef, abstract).num_deepstack)
        pool = (image_rows, width) if image_rows else (0, 0)
        self.lm = LanguageModel(graphdef, abstract, mesh, self.engine, LmShapes(pages, *pool))
        self.state = tuple(jax.tree.leaves(random_state(abstract, mesh)))
        self.caches = [
            {name: _noise(i, array) for name, array in layer.items()}
            for i, layer in enumerate(self.lm.abstract_caches())
        ]
        self.seats = self.lm.new_seats()
        self.text = text_config(config)
        # The embedding is looked up, not read.
        sizes = {path: v.get_value() for path, v in nnx.to_flat_state(abstract) if "embed_tokens" not in map(str, path)}
        self.weight_bytes = sum(v.size * v.dtype.itemsize for v in sizes.values())
        # The head is multiplied with the last rows alone, an expert with the rows that chose it.
        used = {
            "lm_head": 0.0,
            "experts": self.text.get("num_experts_per_tok", 1) / self.text.get("n_routed_experts", 1),
        }
        self.parameters = sum(
            v.size * math.prod(used.get(str(part), 1.0) for part in path) for path, v in sizes.items() if v.ndim > 1
        )
        self.compiled: dict[str, jax.stages.Compiled] = {}
        self.key_bytes = self.lm.bytes_per_page() / self.engine.page_size

    def step(self, rows: int, tile: int, keys: int) -> Step:
        """rows / requests rows at the end of `keys` keys of each request; a request holds pages that lie apart."""
        requests = self.engine.max_seqs if tile == 1 else max(1, min(rows // keys, self.engine.max_seqs))
        each = rows // requests
        request, offset = np.divmod(np.arange(rows, dtype=np.int32), each)
        position = keys - each + offset
        pages = np.random.default_rng(0).permutation(self.engine.max_seqs * self.engine.pages_per_seq)
        table = pages.reshape(self.engine.max_seqs, -1).astype(np.int32)
        size = self.engine.page_size
        sparse = tile > 1 and self.lm.decoder.indexer is not None
        gathered = np.resize(table[:requests, : -(-keys // size)].reshape(-1), self.lm.gather_pages)
        return Step(
            positions=np.tile(position, (3, 1)),
            slots=table[request, position // size] * size + position % size,
            lengths=position + 1,
            tile_request=request[::tile],
            page_table=table,
            last_rows=np.resize(np.arange(requests, dtype=np.int32) * each + each - 1, self.engine.max_seqs),
            key_pages=gathered if sparse else np.zeros(0, np.int32),
            key_starts=np.zeros(rows if sparse else 0, np.int32),
            requests=self._requests(requests, each, keys),
        )

    def _requests(self, requests: int, each: int, keys: int) -> np.ndarray:
        """Step.requests of `each` rows at the end of `keys` keys of the first `requests` seats."""
        seats = np.arange(self.engine.max_seqs, dtype=np.int32)
        runs = seats < requests
        own = np.where(runs, seats, self.engine.max_seqs)
        columns = (own, seats * each, runs * each, runs * (keys - each), own)
        return np.stack(columns).astype(np.int32)

    def compile(self, programs: Sequence[Program]) -> None:
        """Compiles side by side what is not compiled yet."""
        missing = [p for p in programs if p.name not in self.compiled]
        with ThreadPoolExecutor() as pool:
            self.compiled |= zip((p.name for p in missing), pool.map(lambda p: p.compile(), missing), strict=True)

    def run(self, program: Program, inputs: Any, step: Step, trace: Path | None = None) -> float:
        """Median seconds of a pass among others."""
        sampler = self.lm.greedy(self.engine.max_seqs)
        self.compile([program, sampler])
        run, greedy = self.compiled[program.name], self.compiled[sampler.name]
        placed = place(step.packed(), program.args[3])

        latest = self.lm.new_latest()

        def group() -> float:
            nonlocal latest
            begin = time.perf_counter()
            for _ in range(GROUP):
                out = run(self.state, inputs, self.caches, placed)
                self.caches = out.caches
                latest, sampled = greedy(latest, out.keeps, out.logits)
            jax.block_until_ready(sampled)
            return (time.perf_counter() - begin) / GROUP

        group()
        seconds = statistics.median(group() for _ in range(GROUPS))
        if trace is not None:
            with jax.profiler.trace(str(trace)):
                group()
        return seconds

    def decode(self, keys: int, bytes_a_second: float, trace: Path | None = None) -> PassTime:
        rows = self.engine.max_seqs
        program = self.lm.decode(rows, draws=False)
        latest = jax.device_put(np.arange(rows, dtype=np.int32), program.args[1].sharding)
        seconds = self.run(program, latest, self.step(rows, 1, keys), trace)
        work = self.weight_bytes + rows * keys * self.key_bytes
        return PassTime("decode", rows, keys, seconds, work / bytes_a_second, work)

    def prefill(self, rows: int, keys: int, operations_a_second: float, trace: Path | None = None) -> PassTime:
        """keys: of the prompts, rows / keys of them; or the last `rows` of one prompt."""
        program = self.lm.extend(rows, self.lm.selections[0], draws=False)
        inputs = jax.tree.map(lambda a: _noise(0, a), program.args[1])
        seconds = self.run(program, inputs, self.step(rows, ROW_TILE, keys), trace)
        work = 2.0 * self.parameters * rows
        if "head_dim" in self.text:
            seen = rows * (keys - min(rows, keys) / 2)
            work += 4.0 * seen * self.text["num_attention_heads"] * self.text["head_dim"] * len(self.caches)
        return PassTime("prefill", rows, keys, seconds, work / operations_a_second, work)


def _noise(seed: int, array: jax.ShapeDtypeStruct) -> jax.Array:
    def make() -> jax.Array:
        return jax.random.normal(jax.random.key(seed, impl="rbg"), array.shape, jnp.float32).astype(array.dtype)

    return jax.jit(make, out_shardings=array.sharding)()


def device_seconds(folder: Path) -> dict[str, float]:
    """Seconds by operation on the devices in a trace, largest first; names without their numbers."""
    totals: dict[str, float] = {}
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    totals[event.name] = totals.get(event.name, 0.0) + event.duration_ns * 1e-9
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def timed(what: Callable[[], PassTime]) -> dict[str, Any]:
    """A pass as JSON; one that cannot run says why and does not lose the others."""
    try:
        found = what()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {**asdict(found), "rate": found.rate, "floor_over_time": found.floor / found.seconds}


def rates() -> tuple[float, float]:
    """(operations a second of a large product, bytes a second of a large copy) in the device's own dtype, measured."""
    dtype = platform_of(jax.devices()[0]).default_dtype
    size, length = (8192, 1 << 28) if dtype == jnp.bfloat16 else (512, 1 << 20)
    squares = [tuple(normal(2 * i + j, (size, size), dtype) for j in range(2)) for i in range(2)]
    block = [(normal(0, (length,), jnp.float32),)]
    product = median_seconds(compiled(lambda a, b: a @ b, squares[0]), squares)
    copy = median_seconds(compiled(lambda x: x + 1, block[0]), block)
    return 2 * size**3 / product, 2 * block[0][0].nbytes / copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--running", type=int, default=64, help="requests of the decode pass")
    parser.add_argument("--keys", type=int, default=1088, help="keys a request of the decode pass")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens a prompt of the prefill pass")
    parser.add_argument("--rows", type=int, default=2048, help="rows of the prefill pass")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--traces", action="store_true", help="also seconds by operation, under the profiler")
    options = parser.parse_args()
    operations, moved = rates()
    longest = -(-max(options.keys, options.prompt) // 64) * 64
    passes = Passes(
        options.shape, make_mesh(options.tp), running=options.running, prefill_rows=options.rows, length=longest
    )
    found: dict[str, Any] = {
        "device": asdict(platform_of(jax.devices()[0])),
        "jax": jax.__version__,
        "operations_a_second": operations,
        "bytes_a_second": moved,
    }
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder, name) if options.traces else None for name in ("decode", "prefill")]
        found["decode"] = timed(lambda: passes.decode(options.keys, moved, traces[0]))
        found["prefill"] = timed(lambda: passes.prefill(options.rows, options.prompt, operations, traces[1]))
        for name, trace in zip(("decode", "prefill"), traces, strict=True):
            if trace is not None:
                found[f"{name}_operations"] = {op: s / GROUP for op, s in device_seconds(trace).items()}
    for name in ("decode", "prefill"):
        one = found[name]
        print(f"{name}: {one.get('error') or '{seconds:.6f} s, floor / time {floor_over_time:.2f}'.format(**one)}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
