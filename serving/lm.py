"""The decoder's device programs: splice, extend (prefill) and decode, one a bucket, and the paged caches they update.

Pixels never enter these programs. `splice` turns token ids and row-pool slots into hidden rows; `extend` runs a pass
over packed rows of several requests; `decode` looks up and runs one token a request. All are jit of shard_map, compiled
ahead of time and held as `Compiled`, which raises on a mismatch instead of compiling again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from serving.config import ROW_TILE, STATE_CHUNK, EngineConfig
from serving.models.decoder import CacheArray, Decoder, Selection
from serving.models.step import PackedStep, Step
from serving.sampling import SampleArgs, Seats, draw, fill_seat, greedy, keep_tokens, last_tokens, sample, score
from vitstripe.checkpoint import abstract_state
from vitstripe.platform import Platform, platform_of_mesh
from vitstripe.program import Program, zeros_of

REPLICATED = PartitionSpec()
SCORE_ROWS = 64
"""Prompt rows whose logits over the vocabulary are held at one time while a prompt is scored."""
SEAT_COLUMNS = 1024
"""Columns of a seat that one call fills."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PassOutput:
    """What a pass gives: float32 logits [R, V], Step.keeps [R] for who draws the tokens, caches to be used from now on;
    if it draws also the next tokens and seats; and of a prefill pass its hidden rows [T, D] and, if kept, each full
    layer's [T, k] selection."""

    sampled: Any
    logits: Any
    keeps: Any
    caches: Any
    seats: Any
    hidden: Any = None
    selections: Any = None


@dataclass(frozen=True)
class LmShapes:
    """Fixed sizes of the programs: cache pages, and rows and width of the image row pool (0 without images)."""

    pages: int
    pool_rows: int = 0
    pool_width: int = 0


class LanguageModel:
    """Programs over one decoder's state. Owns no arrays but the state; caches are passed in and donated."""

    def __init__(
        self,
        graphdef: Any,
        abstract: nnx.State,
        mesh: Mesh | AbstractMesh,
        config: EngineConfig,
        shapes: LmShapes,
        axis: str = "tp",
        platform: Platform | None = None,
    ):
        """platform: what the programs are compiled for, None for that of the mesh."""
        self.mesh, self.config, self.shapes, self.axis = mesh, config, shapes, axis
        self.platform = platform or platform_of_mesh(mesh)
        # Programs take the weights as a flat tuple: a state of 400 arrays takes milliseconds to flatten at every call.
        leaves, self._tree = jax.tree.flatten(abstract_state(abstract, mesh, axis))
        self._graphdef, self.weights = graphdef, tuple(leaves)
        self.decoder: Decoder = nnx.merge(graphdef, abstract)
        self.dtype = next(
            v.get_value().dtype for p, v in nnx.to_flat_state(abstract) if "embed_tokens" in [str(x) for x in p]
        )

    def _module(self, weights: tuple[Any, ...]) -> Any:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, weights))

    @property
    def _options(self) -> dict[str, Any]:
        # The addresses of a pass differ from those of the last one, and then a CUDA graph of its hundreds of kernels is
        # rewritten while the device waits: a decode step of 12.9 ms became one of 15.0 (H200, Qwen3-VL-8B's shape).
        return {"xla_gpu_enable_command_buffer": ""} if self.platform.kind == "cuda" else {}

    # -- sizes

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The ways the indexer may run in a prefill pass: replicated, and striped where the mesh has devices for it."""
        plain = Selection(None, platform=self.platform)
        if self.decoder.indexer is None or not self.config.indexer_stripes or self.config.tp == 1:
            return (plain,)
        return (plain, Selection(self.config.stripe_rows, self.config.merge, self.platform))

    @property
    def gather_pages(self) -> int:
        """Pages the indexer's key gather holds: those of one longest request, or of several shorter ones."""
        return self.config.pages_per_seq if self.decoder.indexer is not None else 0

    @property
    def keeps_state(self) -> bool:
        """Whether the decoder keeps arrays that have a row a request."""
        return any(a.per_request for layer in self.decoder.caches() for a in layer.values())

    @property
    def row_align(self) -> int:
        """The multiple that a request's rows of a prefill pass start at."""
        return STATE_CHUNK if self.keeps_state else ROW_TILE

    def abstract_caches(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        sizes = self.shapes.pages, self.config.page_size, self.config.max_seqs

        def place(array: CacheArray) -> jax.ShapeDtypeStruct:
            lead = array.lead(*sizes)
            spec = REPLICATED if array.cut is None else PartitionSpec(*[None] * (len(lead) + array.cut), self.axis)
            where = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct((*lead, *array.slot_shape), array.dtype or self.dtype, sharding=where)

        return [{name: place(a) for name, a in layer.items()} for layer in self.decoder.caches()]

    def _bytes(self, *, per_request: bool) -> int:
        """Bytes on each device of what one page, or one request, has in all layers."""
        total = 0
        for a in (a for layer in self.decoder.caches() for a in layer.values() if a.per_request == per_request):
            slots, parts = math.prod(a.lead(1, self.config.page_size, 1)), self.config.tp if a.cut is not None else 1
            total += slots * math.prod(a.slot_shape) * jnp.dtype(a.dtype or self.dtype).itemsize // parts
        return total

    def bytes_per_page(self) -> int:
        """Bytes one page takes on each device, over all layers."""
        return self._bytes(per_request=False)

    def bytes_per_seat(self) -> int:
        """Bytes one request's state takes on each device, over all layers; 0 where the cache is paged alone."""
        return self._bytes(per_request=True)

    def new_caches(self) -> list[dict[str, jax.Array]]:
        """Zeroed caches, placed on the mesh."""
        return zeros_of(self.abstract_caches())

    # -- programs

    def _whole(self, shape: tuple[int, ...], dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, REPLICATED))

    def _step(self, rows: int, requests: int, tile: int) -> PackedStep:
        keys = self.gather_pages if tile > 1 else 0
        step = Step(
            positions=(3, rows),
            slots=(rows,),
            lengths=(rows,),
            tile_request=(rows // tile,),
            page_table=(requests, self.config.pages_per_seq),
            last_rows=(requests,),
            key_pages=(keys,),
            key_starts=(rows if keys else 0,),
            requests=(5, requests),
        )
        shapes = tuple(getattr(step, field.name) for field in fields(step))
        return PackedStep(self._whole((sum(map(math.prod, shapes)),)), shapes)

    def _samples(self, requests: int) -> SampleArgs:
        reals, ints = SampleArgs.shapes(requests)
        return SampleArgs(self._whole(reals, jnp.float32), self._whole(ints))

    def abstract_seats(self) -> Seats:
        """One seat for each request that may run at once."""
        shape = (self.config.max_seqs, self.decoder.vocab_size)
        return Seats(self._whole(shape), self._whole(shape, jnp.float32))

    def abstract_latest(self) -> jax.ShapeDtypeStruct:
        """The last token of every seat. They stay on the devices, so that a decode pass can be dispatched before the
        host has seen the tokens of the pass before it."""
        return self._whole((self.config.max_seqs,))

    def new_latest(self) -> jax.Array:
        """Of empty seats, placed on the mesh."""
        return zeros_of(self.abstract_latest())

    def new_seats(self) -> Seats:
        """Empty seats, placed on the mesh."""
        return zeros_of(self.abstract_seats())

    def _shard_map(self, body: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        # The logits' all_gather and the stripes' merge give every device the same value, which the replication check
        # cannot see for all_gather; tests compare every device's copy instead.
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def splice(self, rows: int) -> Program:
        """(weights, ids [T], pool, pool_index [T]) -> (hidden [T, D], deepstack [K, T, D]). pool_index: the pool row
        of an image token, -1 for text. Without images: (weights, ids) -> hidden."""
        width, levels = self.decoder.hidden_size, self.decoder.num_deepstack
        state_specs = tuple(a.sharding.spec for a in self.weights)

        def text(state, ids):
            return self._module(state).embed(ids)

        @jax.named_scope("splice")
        def mixed(state, ids, pool, pool_index):
            hidden = text(state, ids)
            is_image = (pool_index >= 0)[:, None]
            picked = pool[jnp.maximum(pool_index, 0)].astype(hidden.dtype)
            hidden = jnp.where(is_image, picked[:, :width], hidden)
            deep = jnp.where(is_image, picked[:, width:], 0).reshape(rows, levels, width)
            return hidden, jnp.moveaxis(deep, 1, 0)

        count = {"all_reduce": 1} if self.decoder.shards.vocab else {}
        if not self.shapes.pool_rows:
            fn = self._shard_map(text, (state_specs, REPLICATED), REPLICATED)
            return Program(f"splice/{rows}", jax.jit(fn), (self.weights, self._whole((rows,))), count)
        pool = self._whole((self.shapes.pool_rows, self.shapes.pool_width), self.dtype)
        fn = self._shard_map(mixed, (state_specs, *[REPLICATED] * 3), (REPLICATED, REPLICATED))
        args = (self.weights, self._whole((rows,)), pool, self._whole((rows,)))
        return Program(f"splice/{rows}", jax.jit(fn), args, count)

    def _pass(
        self, name: str, rows: int, requests: int, tile: int, selection: Selection, *, keep: bool, draws: bool
    ) -> Program:
        embeds = tile == 1
        has_deep = not embeds and self.decoder.num_deepstack > 0
        state_specs = tuple(a.sharding.spec for a in self.weights)
        cache_specs = jax.tree.map(lambda a: a.sharding.spec, self.abstract_caches())

        def body(state, inputs, caches, packed):
            decoder, step = self._module(state), packed.step()
            hidden, deep = (decoder.embed(last_tokens(inputs, step.seats)), None) if embeds else inputs
            hidden, caches, selections = decoder.forward(hidden, deep, caches, step, selection)
            logits = decoder.logits(hidden[step.last_rows])
            return logits, step.keeps, caches, None if embeds else hidden, selections if keep else None

        mapped = self._shard_map(
            body,
            (state_specs, REPLICATED, cache_specs, REPLICATED),
            (REPLICATED, REPLICATED, cache_specs, REPLICATED, REPLICATED),
        )

        def run(state, inputs, caches, step, *sampling):
            logits, keeps, caches, hidden, selections = mapped(state, inputs, caches, step)
            sampled, seats = sample(logits, *sampling) if draws else (None, None)
            return PassOutput(sampled, logits, keeps, caches, seats, hidden, selections)

        whole = NamedSharding(self.mesh, REPLICATED)
        cache_out = jax.tree.map(lambda a: a.sharding, self.abstract_caches())
        out = PassOutput(
            sampled=whole if draws else None,
            logits=whole,
            keeps=whole,
            caches=cache_out,
            seats=whole if draws else None,
            hidden=None if embeds else whole,
            selections=whole if keep else None,
        )
        fn = jax.jit(run, donate_argnums=(2, 5) if draws else 2, out_shardings=out)
        width = self.decoder.hidden_size
        if embeds:
            inputs = self.abstract_latest()
        else:
            deep = self._whole((self.decoder.num_deepstack, rows, width), self.dtype) if has_deep else None
            inputs = (self._whole((rows, width), self.dtype), deep)
        args = (
            self.weights,
            inputs,
            self.abstract_caches(),
            self._step(rows, requests, tile),
            *((self._samples(requests), self.abstract_seats()) if draws else ()),
        )
        return Program(name, fn, args, self.decoder.collectives(embeds=embeds, selection=selection), self._options)

    def extend_name(self, rows: int, selection: Selection) -> str:
        kind = "" if self.decoder.indexer is None else "/striped" if selection.stripe_rows else "/replicated"
        return f"extend/{rows}{kind}"

    def extend(self, rows: int, selection: Selection, *, keep_selections: bool = False, draws: bool = True) -> Program:
        """(weights, (hidden [T, D], deepstack [K, T, D] or None), caches, PackedStep, SampleArgs, Seats) -> PassOutput.
        keep_selections: with its selections, for checks. draws: False leaves the last two arguments out, and the
        tokens to `sample`, `draw` or `greedy`."""
        name, most = self.extend_name(rows, selection), self.config.max_seqs
        return self._pass(name, rows, most, ROW_TILE, selection, keep=keep_selections, draws=draws)

    def decode(self, requests: int, *, draws: bool = True) -> Program:
        """(weights, latest [seats], caches, PackedStep, SampleArgs, Seats) -> PassOutput: a request's token is the last
        one of its seat. draws: as in `extend`."""
        how = Selection(None, platform=self.platform)
        return self._pass(f"decode/{requests}", requests, requests, 1, how, keep=False, draws=draws)

    def sample(self, requests: int) -> Program:
        """(latest [seats], keeps [R], logits [R, V], SampleArgs, Seats) -> (latest, Sampled, Seats): whatever the
        requests ask for."""

        def run(latest, keeps, logits, args, seats):
            sampled, seats = sample(logits, args, seats)
            return keep_tokens(latest, keeps, sampled.tokens), sampled, seats

        args = (self._samples(requests), self.abstract_seats())
        return self._sampler(f"sample/{requests}", run, requests, *args, donated=(0, 4))

    def greedy(self, requests: int) -> Program:
        """(latest [seats], keeps [R], logits [R, V]) -> (latest, Sampled), where no request asks for more than the
        largest logit."""

        def run(latest, keeps, logits):
            sampled = greedy(logits)
            return keep_tokens(latest, keeps, sampled.tokens), sampled

        return self._sampler(f"greedy/{requests}", run, requests)

    def draw(self, requests: int) -> Program:
        """(latest [seats], keeps [R], logits [R, V], SampleArgs) -> (latest, Sampled), where no request asks for more
        than temperature and filters."""

        def run(latest, keeps, logits, args):
            sampled = draw(logits, args, branch=self.platform.kind == "cpu")
            return keep_tokens(latest, keeps, sampled.tokens), sampled

        return self._sampler(f"draw/{requests}", run, requests, self._samples(requests))

    def _sampler(self, name: str, run: Callable, requests: int, *args: Any, donated: tuple[int, ...] = (0,)) -> Program:
        fn = jax.jit(run, donate_argnums=donated, out_shardings=NamedSharding(self.mesh, REPLICATED))
        return Program(name, fn, (self.abstract_latest(), self._whole((requests,)), self._logits(requests), *args))

    def _logits(self, requests: int) -> jax.ShapeDtypeStruct:
        return self._whole((requests, self.decoder.vocab_size), jnp.float32)

    def score(self, rows: int) -> Program:
        """(weights, hidden [T, D] of a prefill pass, next token [T], alternatives) -> Scores of the next tokens. In
        blocks, because logits of all rows would not fit: 8192 rows of 150k float32 are 5 GB."""
        state_specs = tuple(a.sharding.spec for a in self.weights)
        block = math.gcd(rows, SCORE_ROWS)

        def body(state, hidden, following, count):
            decoder = self._module(state)
            blocks = (hidden.reshape(-1, block, hidden.shape[-1]), following.reshape(-1, block))
            scores = jax.lax.map(lambda part: score(decoder.logits(part[0]), part[1], count), blocks)
            return jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), scores)

        fn = self._shard_map(body, (state_specs, REPLICATED, REPLICATED, REPLICATED), REPLICATED)
        hidden = self._whole((rows, self.decoder.hidden_size), self.dtype)
        args = (self.weights, hidden, self._whole((rows,)), self._whole(()))
        return Program(f"score/{rows}", jax.jit(fn), args, {"all_gather": 1} if self.decoder.shards.vocab else {})

    def fill_seat(self) -> Program:
        """(seats, seat, clear, ids, tokens, bias) -> Seats; see serving.sampling.fill_seat."""
        columns = (SEAT_COLUMNS,)
        args = (
            self.abstract_seats(),
            self._whole(()),
            self._whole((), jnp.bool_),
            self._whole(columns),
            self._whole(columns),
            self._whole(columns, jnp.float32),
        )
        whole = NamedSharding(self.mesh, REPLICATED)
        return Program("seat", jax.jit(fill_seat, donate_argnums=0, out_shardings=whole), args)

    def programs(self) -> list[Program]:
        """Everything that runs after ready."""
        made = [self.splice(t) for t in self.config.token_buckets]
        made += [self.extend(t, s, draws=False) for t in self.config.token_buckets for s in self.selections]
        made += [self.score(t) for t in self.config.token_buckets]
        # The tokens are drawn by programs of their own: see serving.sampling.
        for size in self.config.batch_buckets:
            made += [self.decode(size, draws=False), self.sample(size), self.draw(size), self.greedy(size)]
        return [*made, self.fill_seat()]
