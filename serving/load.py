"""From a checkpoint folder to a warmed engine, in the order that decides what memory is left for what: weights, vision
warm-up, cache pages from what is free, the indexer's check, language warm-up."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from jax.sharding import Mesh

from serving.config import EngineConfig
from serving.engine import Engine
from serving.lm import LanguageModel, LmShapes
from serving.metrics import Metrics
from serving.models import bind_decoder, cache_formats, family_of
from serving.models.config import text_config
from serving.runner import Runner
from serving.scheduler import Scheduler
from vitbatch import CompileGuard, EncoderConfig, VisionEncoder
from vitbatch.checkpoint import bind_tower
from vitstripe.checkpoint import Checkpoint, CheckpointError, load, raise_problems
from vitstripe.platform import platform_of_mesh

Advance = Callable[[int, int, str], None]
"""Called with (done, in all, what comes next)."""

Stage = Callable[[str], AbstractContextManager[Advance]]
"""Opens a stage of the start-up, by its name; gives what reports its progress."""


@contextmanager
def silent(name: str) -> Iterator[Advance]:
    yield lambda done, total, what: None


@dataclass(frozen=True)
class Start:
    """What load_engine made: the engine, and what its start-up cost."""

    engine: Engine
    vision_programs: int
    language_programs: int


def has_images(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a vision tower beside its decoder."""
    return isinstance(checkpoint.config.get("vision_config"), dict)


def load_engine(
    checkpoint: Checkpoint,
    mesh: Mesh,
    config: EngineConfig,
    encoder_config: EncoderConfig,
    *,
    model_name: str,
    eos_ids: frozenset[int],
    metrics: Metrics,
    guard: CompileGuard,
    stage: Stage = silent,
    on_death: Callable[[str], None] = lambda detail: None,
) -> Start:
    """Loads and warms; the engine is not started yet. Raises CheckpointError listing everything wrong with the folder,
    ValueError when memory does not suffice, RuntimeError when a check of the indexer fails, CollectiveHang naming a
    program whose first run does not come back."""
    platform = platform_of_mesh(mesh)
    dtype = platform.default_dtype
    family = family_of(checkpoint.config)
    formats = cache_formats(checkpoint.config, config, platform)
    binding = bind_decoder(checkpoint, tp=config.tp, dtype=dtype, formats=formats)
    raise_problems(checkpoint, [binding, *([bind_tower(checkpoint, dtype=dtype)] if has_images(checkpoint) else [])])

    # Raise ValueError for flags that this model cannot take: now, and not after minutes of loading.
    sizing = LanguageModel(binding.graphdef, binding.abstract, mesh, config, LmShapes(1))
    sizing.abstract_caches()
    Scheduler(config, 1, align=sizing.row_align)

    with stage("language weights") as advance:
        state = load(checkpoint, binding, mesh, progress=lambda done, total: advance(done, total, ""))
    encoder, vision_programs = None, 0
    if has_images(checkpoint):
        with stage("vision weights") as advance:
            encoder = VisionEncoder.from_checkpoint(
                checkpoint, mesh=mesh, config=encoder_config, progress=lambda done, total: advance(done, total, "")
            )
        if encoder.out_hidden_size != _hidden_size(checkpoint):
            raise CheckpointError(
                f"{checkpoint.folder}: the tower gives rows of {encoder.out_hidden_size}, the decoder takes "
                f"{_hidden_size(checkpoint)}; the two halves do not belong together"
            )
        with stage("vision programs") as advance:
            vision_programs = len(encoder.warm_up(advance, seconds=config.first_run_seconds).buckets)
    runner = Runner(binding.graphdef, binding.abstract, state, mesh, config, encoder)
    with stage("language programs") as advance:
        language_programs = len(runner.warm_up(advance))
    engine = Engine(
        runner,
        config,
        model_name=model_name,
        eos_ids=eos_ids,
        metrics=metrics,
        guard=guard,
        uses_mrope=family.uses_mrope,
        on_death=on_death,
    )
    return Start(engine, vision_programs, language_programs)


def _hidden_size(checkpoint: Checkpoint) -> int:
    return text_config(checkpoint.config)["hidden_size"]
