"""Records and reads a trace of each part of a step: a vision call, an indexer layer, a prefill pass, a decode pass.

Needs the project's packages; `scripts/profile_step` brings them, or run `python -m scripts.lib.profile_step` in an
environment of your own. Runs on whatever device is there: at the widths of released models on a GPU, tiny on a CPU.
"""

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from dsa_indexer import Indexer, IndexerConfig, RowBatch, StripeConfig, striped_topk_projected, topk_rows
from dsa_indexer.projection import project_rows
from scripts.lib.bench_passes import Passes, place
from scripts.lib.bench_vision import frames_of
from scripts.lib.made_up_model import random_state
from scripts.lib.made_up_tower import TowerSize, write_checkpoint
from scripts.lib.trace_scopes import HOST_SCOPES, OTHER, SCOPES, Section, read_section
from serving.config import ROW_TILE
from serving.sampling import SampleArgs
from vitbatch import EncoderConfig, PreparedImage, VisionEncoder
from vitstripe import make_mesh
from vitstripe.platform import default_platform

RUN = "profiled run"


@dataclass(frozen=True)
class Sizes:
    """What is run: the tower, images of a call and their grid; rows and keys of the indexer; rows of the prefill pass;
    requests and keys of the passes; made_up_model's shape of their decoder."""

    tower: TowerSize
    images: int
    grid: tuple[int, int]
    rows: int
    keys: int
    heads: int
    head_dim: int
    topk: int
    hidden: int
    prefill: int
    requests: int
    context: int
    decoder: str


LARGE = Sizes(
    TowerSize(width=1152, depth=27, heads=16, mlp=4304, out=4096, deepstack=3),
    images=32,
    grid=(32, 32),
    rows=2048,
    keys=32768,
    heads=32,
    head_dim=128,
    topk=2048,
    hidden=6144,
    prefill=2048,
    requests=16,
    context=8192,
    decoder="glm",
)
TINY = Sizes(
    TowerSize(width=128, depth=2, heads=2, mlp=256, out=64, deepstack=0),
    images=3,
    grid=(8, 8),
    rows=200,
    keys=600,
    heads=4,
    head_dim=32,
    topk=64,
    hidden=96,
    prefill=96,
    requests=2,
    context=128,
    decoder="tiny-glm",
)


@dataclass(frozen=True)
class Work:
    """One kind of step. run: dispatches it and waits. programs: everything it runs on the devices, compiled."""

    name: str
    run: Callable[[], Any]
    programs: list[jax.stages.Compiled]


def vision_call(sizes: Sizes, mesh: Mesh, scratch: Path) -> Work:
    """A call of the vision encoder with new images of one grid, dealt over the mesh, to rows in the pool."""
    folder = write_checkpoint(scratch / "tower", sizes.tower)
    encoder = VisionEncoder.from_checkpoint(folder, mesh=mesh, config=EncoderConfig())
    frames = frames_of([sizes.grid] * sizes.images, encoder.vision_config.patch_pixels)
    grid, tokens = (1, *sizes.grid), math.prod(sizes.grid) // encoder.vision_config.patches_per_token
    keys = map(str, itertools.count())

    def call() -> None:
        images = [
            PreparedImage(frame.rows, grid, f"image {next(keys)}".ljust(16).encode(), tokens, (0, 0))
            for frame in frames
        ]
        encoder.encode_to_pool(images)
        encoder.release([image.key for image in images])

    call()
    return Work("vision call", call, [c.compiled for c in encoder._compiled.values()])


def indexer_layer(sizes: Sizes, mesh: Mesh, merge: str | None) -> Work:
    """Projection, scores, selection and merge of one layer's rows. merge: None for the replicated form."""
    dtype = default_platform().default_dtype
    config = IndexerConfig(
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        topk=sizes.topk,
        rope_dim=sizes.head_dim // 2,
        rope_theta=8e6,
        q_lora_rank=sizes.hidden // 3,
        hidden_size=sizes.hidden,
        layer_types=("full",),
    )
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Indexer(config, dtype)))
    state = random_state(abstract, mesh)
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), dtype)

    angles = jnp.asarray(draw.uniform(0, 6, (sizes.rows, config.rope_dim // 2)), jnp.float32)
    inputs = (
        normal(sizes.rows, sizes.hidden),
        normal(sizes.rows, config.q_lora_rank),
        jnp.cos(angles),
        jnp.sin(angles),
    )
    keys = normal(sizes.keys, sizes.head_dim)
    # The last chunk of one causal prompt.
    lengths = jnp.arange(sizes.keys - sizes.rows + 1, sizes.keys + 1, dtype=jnp.int32)
    rows = RowBatch(jnp.zeros_like(lengths), lengths)

    def layer(state: Any, inputs: Any, keys: jax.Array, rows: RowBatch) -> jax.Array:
        project = nnx.merge(graphdef, state).queries
        if merge is None:
            return topk_rows(*project_rows(project, inputs), keys, None, rows, k=sizes.topk)
        stripes = StripeConfig(merge=merge)
        return striped_topk_projected(project, inputs, keys, None, rows, k=sizes.topk, mesh=mesh, stripes=stripes)

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if merge is None and mesh.size > 1:
        whole = jax.sharding.PartitionSpec()
        layer = jax.shard_map(layer, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    arguments = jax.device_put((state, inputs, keys, rows), everywhere)
    compiled = jax.jit(layer).lower(*arguments).compile()
    name = "indexer layer, " + ("replicated" if merge is None else f"striped, {merge}")
    return Work(name, lambda: jax.block_until_ready(compiled(*arguments)), [compiled])


def prefill_pass(sizes: Sizes, mesh: Mesh) -> Work:
    """Splice and prefill pass of a sparse-attention decoder with random weights: the last rows of one prompt, every
    third of them an image's. Over several devices the indexer's rows are striped."""
    rows = sizes.prefill
    passes = Passes(sizes.decoder, mesh, running=1, prefill_rows=rows, length=sizes.context, image_rows=rows)
    splice, extend = passes.lm.splice(rows), passes.lm.extend(rows, passes.lm.selections[-1], draws=False)
    passes.compile([splice, extend])
    put_in, run_pass = passes.compiled[splice.name], passes.compiled[extend.name]
    step = place(passes.step(rows, ROW_TILE, sizes.context).packed(), extend.args[3])
    tokens = np.arange(rows, dtype=np.int32)
    ids, pool_index = place((tokens, np.where(tokens % 3, -1, tokens)), (splice.args[1], splice.args[3]))
    pool = jax.jit(jnp.ones, static_argnums=(0, 1), out_shardings=splice.args[2].sharding)(
        splice.args[2].shape, splice.args[2].dtype
    )

    def run() -> None:
        hidden, deep = put_in(passes.state, ids, pool, pool_index)
        out = run_pass(passes.state, (hidden, deep if passes.lm.decoder.num_deepstack else None), passes.caches, step)
        passes.caches = out.caches
        jax.block_until_ready(out.logits)

    return Work("splice and prefill pass", run, [put_in, run_pass])


def decode_pass(sizes: Sizes, mesh: Mesh) -> Work:
    """A decode pass of a sparse-attention decoder with random weights."""
    passes = Passes(sizes.decoder, mesh, running=sizes.requests, prefill_rows=64, length=sizes.context)
    program = passes.lm.decode(sizes.requests)
    passes.compile([program])
    compiled = passes.compiled[program.name]
    step = place(passes.step(sizes.requests, 1, sizes.context).packed(), program.args[3])
    samples = place(SampleArgs.stack([], [], [], sizes.requests), program.args[4])
    latest = jax.device_put(np.arange(sizes.requests, dtype=np.int32), program.args[1].sharding)

    def run() -> None:
        out = compiled(passes.state, latest, passes.caches, step, samples, passes.seats)
        passes.caches, passes.seats = out.caches, out.seats
        jax.block_until_ready(out.sampled)

    return Work("decode pass", run, [compiled])


def works(sizes: Sizes, mesh: Mesh, scratch: Path) -> dict[str, Callable[[], Work]]:
    """What can be profiled, by name; each is made when it is called."""
    found = {
        "vision": lambda: vision_call(sizes, mesh, scratch),
        "indexer": lambda: indexer_layer(sizes, mesh, None),
        "prefill": lambda: prefill_pass(sizes, mesh),
        "decode": lambda: decode_pass(sizes, mesh),
    }
    if mesh.size > 1:
        found["striped"] = lambda: indexer_layer(sizes, mesh, "pmax")
        found["gathered"] = lambda: indexer_layer(sizes, mesh, "all_gather")
    return found


def record(work: Work, folder: Path, runs: int) -> Section:
    """Runs `work` twice to warm it, then `runs` times under the profiler; the trace is left in folder and read."""
    for _ in range(2):
        work.run()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # following every Python call slows the host, which is measured too
    with jax.profiler.trace(str(folder), profiler_options=options):
        for _ in range(runs):
            with jax.profiler.TraceAnnotation(RUN):
                work.run()
    return read_section(folder, work.name, work.programs, annotation=RUN)


def scope_table(section: Section, devices: int) -> Table:
    """Milliseconds a run of each scope, a device's mean."""
    per = 1e3 / section.runs / max(devices, 1)
    total = sum(section.scopes.values()) or 1.0
    table = Table(
        title=f"{section.name}: {1e3 * section.wall / section.runs:.2f} ms a run, {section.host_share:.0%} of it the "
        f"devices wait for the host",
        title_justify="left",
        box=None,
        padding=(0, 2),
    )
    for column in ("scope", "ms a run", "share", "most of it"):
        table.add_column(column, justify="left" if column in ("scope", "most of it") else "right")
    for scope in (*SCOPES, OTHER):
        if scope not in section.scopes:
            continue
        own = sorted(((s, op) for (sc, op), s in section.operations.items() if sc == scope), reverse=True)[:3]
        most = ", ".join(f"{op} {per * s:.3f}" for s, op in own)
        seconds = section.scopes[scope]
        table.add_row(scope, f"{per * seconds:.3f}", f"{seconds / total:.0%}", most)
    for scope, seconds in section.host.items():
        table.add_row(f"{scope} (host)", f"{1e3 * seconds / section.runs:.3f}", "", "")
    return table


def device_lines(section: Section) -> Iterator[str]:
    for device, busy in sorted(section.busy.items()):
        gaps = section.gaps[device]
        yield (
            f"  {device}: busy {busy / section.wall:.0%}, {len(gaps)} gaps, the longest "
            f"{1e3 * max(gaps, default=0):.2f} ms, together {1e3 * sum(gaps) / section.runs:.2f} ms a run"
        )


def markdown_of(sections: Sequence[Section], devices: int) -> list[str]:
    """The table for docs/benchmarks.md: milliseconds a run by scope."""
    host = [s for s in HOST_SCOPES if any(s in section.host for section in sections)]
    scopes = [s for s in (*SCOPES, OTHER) if any(s in section.scopes for section in sections)]
    heads = [*(f"{s} (host)" for s in host), *scopes]
    lines = [f"| step | ms a run | host | {' | '.join(heads)} |", "|---" * (len(heads) + 3) + "|"]
    for section in sections:
        per = 1e3 / section.runs / max(devices, 1)
        cells = [f"{1e3 * section.host[s] / section.runs:.3f}" if s in section.host else "" for s in host]
        cells += [f"{per * section.scopes[s]:.3f}" if s in section.scopes else "" for s in scopes]
        wall = f"{1e3 * section.wall / section.runs:.2f}"
        lines.append(f"| {section.name} | {wall} | {section.host_share:.0%} | {' | '.join(cells)} |")
    return lines


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/profile_step",
        description="Profiles a vision call, an indexer layer (replicated, and striped with both merges on several "
        "devices), a prefill pass with its splice and a decode pass on this machine's devices, with random weights. "
        "Prints device time by named scope, gaps and the host's share, without command buffers, which would hide their "
        "operations. Leaves traces for xprof (tensorboard) and Perfetto (ui.perfetto.dev opens the .trace.json.gz).",
        epilog="example: scripts/profile_step --out profiles",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("profiles"), help="where the traces go")
    parser.add_argument("--tp", type=int, help="devices; all of them, or 2 made ones on a CPU, if not given")
    parser.add_argument("--runs", type=int, default=5, help="runs of each under the profiler")
    parser.add_argument("--size", choices=("auto", "tiny", "large"), default="auto", help="auto: large on a GPU")
    parser.add_argument("--rows", type=int, help="query rows of the indexer")
    parser.add_argument("--keys", type=int, help="keys of the indexer")
    parser.add_argument("--only", nargs="+", choices=("vision", "indexer", "striped", "gathered", "prefill", "decode"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    jax.config.update("jax_num_cpu_devices", options.tp or 2)
    # A command buffer (CUDA or HIP graph) is one event in a trace, and hides what runs in it.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    platform = default_platform()
    mesh = make_mesh(options.tp or len(jax.devices()))
    large = options.size == "large" or (options.size == "auto" and platform.kind != "cpu")
    given = {name: value for name in ("rows", "keys") if (value := getattr(options, name)) is not None}
    sizes = replace(LARGE if large else TINY, **given)
    console, sections, failed = Console(width=150, highlight=False), [], 0
    console.print(
        f"{mesh.size} x {platform.name} ({platform.kind}), jax {jax.__version__}, {options.runs} runs of each"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in works(sizes, mesh, Path(scratch)).items():
            if options.only and name not in options.only:
                continue
            try:
                with console.status(f"{name}: compiling and running"):
                    section = record(make(), options.out / name, options.runs)
            except Exception:  # one step that cannot run must not lose the others
                console.print(f"{name} failed:\n{traceback.format_exc()}", markup=False)
                failed += 1
                continue
            sections.append(section)
            console.print(scope_table(section, mesh.size))
            for line in device_lines(section):
                console.print(line)
            if not section.busy:
                console.print("  problem: the trace holds no device events (docs/rocm.md, known faults)")
                failed += 1
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {
        "device": platform.name,
        "devices": mesh.size,
        "jax": jax.__version__,
        "sections": [
            {**asdict(s), "operations": {f"{scope}/{op}": t for (scope, op), t in s.operations.items()}}
            for s in sections
        ],
    }
    (options.out / "profile.json").write_text(json.dumps(summary, indent=1) + "\n")
    (options.out / "profile.md").write_text("\n".join(markdown_of(sections, mesh.size)) + "\n")
    console.print(f"traces, profile.json and profile.md are in {options.out}/")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
