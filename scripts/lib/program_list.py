"""Every device program of the three packages, enumerated from their registries at the widths of released models.

Nothing here is a list kept by hand: towers come from vitbatch's registry, decoders from serving's, indexers from
dsa_indexer's, and each package says which programs it makes of them. What a registry holds and `model_sizes` does not,
and any place in the code that makes a Program and was not reached, is returned as missing.
"""

import ast
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import dsa_indexer
from dsa_indexer import IndexerConfig, IndexerShapes, KeyFormat, LatentShape, StripeConfig
from dsa_indexer.config import MERGES
from dsa_indexer.config import MODEL_TYPES as INDEXERS
from scripts.lib.model_sizes import ANOTHER_S_TOWER, MODEL_TYPES, config_of
from serving import models
from serving.config import EngineConfig
from serving.lm import LanguageModel, LmShapes
from serving.models.decoder import CacheFormats
from vitbatch.config import TINY_BLOCK, Bucket
from vitbatch.program import bucket_program, build_encode
from vitbatch.towers import FAMILIES as TOWERS
from vitstripe import Program
from vitstripe.checkpoint import abstract_state
from vitstripe.platform import Platform

ROOT = Path(__file__).parents[2]
PACKAGES = ("vitbatch", "dsa_indexer", "serving")

AnyMesh = Mesh | AbstractMesh

BUCKETS = (Bucket(256, TINY_BLOCK), Bucket(256), Bucket(4096))
"""Lanes that a tower is checked with, of each kind: the other buckets are the same programs at other sizes."""

_POOL_ROWS = 4096


@dataclass(frozen=True)
class Listed:
    """A program and where it comes from. group: the line of the report it counts for, e.g. "tower qwen3_vl"."""

    package: str
    group: str
    program: Program

    @property
    def kind(self) -> str:
        """The program's name without its sizes: "extend/striped" for "extend/512/striped"."""
        return "/".join(part for part in self.program.name.split("/") if not part.isdigit())


@dataclass(frozen=True)
class Scope:
    """At how many sizes the programs are made; the tests' fast form has fewer. Every kind is there in any case.

    every_input: also the buckets of normalised rows, and those that every device encodes.
    """

    buckets: Sequence[Bucket] = BUCKETS
    every_input: bool = True
    prefill_tokens: int = 512
    max_seqs: int = 4


def _representatives(registry: dict[str, Any], sizes: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """{model_type of `sizes`: every model_type registered for the same code}, and model_types without any sizes."""
    found, missing = {}, []
    for model_type, family in registry.items():
        alike = [other for other, its in registry.items() if its is family]
        known = [other for other in alike if other in sizes]
        if known:
            # Two sets of sizes of the same code are both made; names without sizes stand with the first.
            found.update({k: k for k in known[1:]})
            found[known[0]] = ", ".join([known[0], *(a for a in alike if a not in known)])
        else:
            missing.append(f"{model_type}: registered, but scripts/lib/model_sizes.py has no sizes for it")
    return found, missing


def tower_programs(model_type: str, mesh: AnyMesh, platform: Platform, scope: Scope) -> Iterator[Program]:
    """Buckets of uint8 pixels and of normalised rows, dealt over the mesh; and of pixels that every device encodes."""
    family = TOWERS[model_type]
    vision = family.read_config(config_of(model_type))
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: family.build(vision, jnp.bfloat16)))
    state = abstract_state(abstract, mesh, "tp")
    everywhere = NamedSharding(mesh, PartitionSpec())
    pool = jax.ShapeDtypeStruct((_POOL_ROWS, vision.row_width), jnp.bfloat16, sharding=everywhere)
    ways = (("tp", (jnp.uint8, jnp.float32)), (None, (jnp.uint8,))) if scope.every_input else (("tp", (jnp.uint8,)),)
    for axis, dtypes in ways:
        encode = build_encode(graphdef, state, vision, (0.5,) * 3, (0.25,) * 3, mesh, axis, platform)
        for bucket in scope.buckets:
            for dtype in dtypes:
                yield bucket_program(encode, state, pool, vision, family.num_taps, mesh, axis, bucket, dtype)


def indexer_programs(model_type: str, mesh: AnyMesh, platform: Platform) -> Iterator[Program]:
    """Every program of an indexer layer: both merges, keys and latents in bfloat16 and in the architecture's float8."""
    config = config_of(model_type)
    indexer = IndexerConfig.from_hf(config)
    text = config.get("text_config") or config
    shapes = IndexerShapes(rows=1000, key_pages=251, requests=5, pages=999, page_size=64, pages_per_request=251)
    latent = LatentShape(
        heads=max(1, text["num_attention_heads"] // mesh.shape["tp"]),
        width=text["kv_lora_rank"] + text["qk_rope_head_dim"],
        value_dim=text["kv_lora_rank"],
        scale=256**-0.5,
    )
    for form, merge in ((KeyFormat(), MERGES[0]), (KeyFormat.fp8(platform.arch), MERGES[1])):
        yield from dsa_indexer.programs(
            indexer,
            shapes,
            mesh,
            form=form,
            stripes=StripeConfig(merge=merge),
            latent=replace(latent, form=form),
            platform=platform,
        )


def language_programs(
    model_type: str, family: Any, mesh: AnyMesh, platform: Platform, scope: Scope
) -> Iterator[Program]:
    """Everything a server of this decoder runs. Its passes twice where it has an indexer: with either merge, with keys
    and latents in bfloat16 and in the architecture's float8."""
    tp, config = mesh.shape["tp"], config_of(model_type)
    pool = (0, 0)
    if isinstance(config.get("vision_config"), dict):
        pool = (_POOL_ROWS, TOWERS[model_type].read_config(config).row_width)
    seen: set[str] = set()
    for merge, float8 in zip(MERGES, (False, True), strict=True):
        form = KeyFormat.fp8(platform.arch)
        more = (CacheFormats(index_keys=form, latents=form),) if family.has_indexer and float8 else ()
        graphdef, abstract = nnx.split(nnx.eval_shape(lambda more=more: family.build(config, tp, jnp.bfloat16, *more)))
        engine = EngineConfig(
            tp=tp,
            max_model_len=8192,
            prefill_tokens=scope.prefill_tokens,
            max_seqs=scope.max_seqs,
            merge=merge,
        )
        lm = LanguageModel(graphdef, abstract, mesh, engine, LmShapes(1024, *pool), platform=platform)
        for program in lm.programs():
            if program.name not in seen or (more and program.name.startswith(("extend/", "decode/"))):
                yield program
            seen.add(program.name)


def listed(mesh: AnyMesh, platform: Platform, scope: Scope | None = None) -> tuple[list[Listed], list[str]]:
    """Every program for this mesh and platform, and what is missing from the list, in words."""
    scope = scope or Scope()
    found: list[Listed] = []
    towers, missing_towers = _representatives(TOWERS, [name for name in MODEL_TYPES if name not in ANOTHER_S_TOWER])
    decoders, missing_decoders = _representatives(models.families(), MODEL_TYPES)
    for model_type, label in towers.items():
        made = tower_programs(model_type, mesh, platform, scope)
        found += [Listed("vitbatch", f"tower {label}", program) for program in made]
    for model_type in INDEXERS:
        found += [
            Listed("dsa_indexer", f"indexer {model_type}", program)
            for program in indexer_programs(model_type, mesh, platform)
        ]
    for model_type, label in decoders.items():
        made = language_programs(model_type, models.families()[model_type], mesh, platform, scope)
        found += [Listed("serving", f"decoder {label}", program) for program in made]
    return found, missing_towers + missing_decoders


# -- places in the code that make a Program


@dataclass(frozen=True)
class Site:
    """A call of Program(...). path: relative to the project's root."""

    path: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.path}:{self.first}"


def program_sites() -> list[Site]:
    """Every call of Program(...) in the packages."""
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if not re.search(r"\bProgram\(", text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Program":
                    path = str(file.relative_to(ROOT))
                    found.append(Site(path, node.lineno, node.end_lineno or node.lineno))
    return found


@contextlib.contextmanager
def reached_sites() -> Iterator[set[tuple[str, int]]]:
    """The (file, line) that made each Program while the block ran."""
    reached: set[tuple[str, int]] = set()
    make = Program.__init__

    def noted(self: Program, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        make(self, *args, **kwargs)

    Program.__init__ = noted
    try:
        yield reached
    finally:
        Program.__init__ = make


def unreached(reached: set[tuple[str, int]]) -> list[str]:
    """Places that make a Program and were not reached, in words."""
    at = [(str(Path(file).resolve()), line) for file, line in reached]
    return [
        f"{site}: makes a Program that no list led to"
        for site in program_sites()
        if not any(file == str(ROOT / site.path) and site.first <= line <= site.last for file, line in at)
    ]
