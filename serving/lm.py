"""The decoder's device programs: splice, extend (prefill) and decode, one a bucket, and the paged caches they update.

Pixels never enter these programs. `splice` turns token ids and row-pool slots into hidden rows; `extend` runs a pass
over packed rows of several requests; `decode` looks up and runs one token a request. All are jit of shard_map, compiled
ahead of time and held as `Compiled`, which raises on a mismatch instead of compiling again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from serving.config import ROW_TILE, EngineConfig
from serving.models.decoder import CacheArray, Decoder, Selection
from serving.models.step import Step
from serving.sampling import SampleArgs, sample
from vitstripe.checkpoint import abstract_state
from vitstripe.program import Program

REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class LmShapes:
    """Fixed sizes of the programs: cache pages, and rows and width of the image row pool (0 without images)."""

    pages: int
    pool_rows: int = 0
    pool_width: int = 0


class LanguageModel:
    """Programs over one decoder's state. Owns no arrays but the state; caches are passed in and donated."""

    def __init__(
        self, graphdef: Any, abstract: nnx.State, mesh: Mesh, config: EngineConfig, shapes: LmShapes, axis: str = "tp"
    ):
        self.mesh, self.config, self.shapes, self.axis = mesh, config, shapes, axis
        self.graphdef, self.abstract = graphdef, abstract_state(abstract, mesh, axis)
        self.decoder: Decoder = nnx.merge(graphdef, abstract)
        self.dtype = next(
            v.get_value().dtype for p, v in nnx.to_flat_state(abstract) if "embed_tokens" in [str(x) for x in p]
        )

    # -- sizes

    @property
    def selections(self) -> tuple[Selection, ...]:
        """The ways the indexer may run in a prefill pass: replicated, and striped where the mesh has devices for it."""
        plain = Selection(None)
        if self.decoder.indexer is None or not self.config.indexer_stripes or self.config.tp == 1:
            return (plain,)
        return (plain, Selection(self.config.stripe_rows, self.config.merge))

    @property
    def gather_pages(self) -> int:
        """Pages the indexer's key gather holds: those of one longest request, or of several shorter ones."""
        return self.config.pages_per_seq if self.decoder.indexer is not None else 0

    def cache_shardings(self) -> list[dict[str, NamedSharding]]:
        def place(array: CacheArray) -> NamedSharding:
            spec = REPLICATED if array.cut is None else PartitionSpec(*[None] * (2 + array.cut), self.axis)
            return NamedSharding(self.mesh, spec)

        return [{name: place(a) for name, a in layer.items()} for layer in self.decoder.caches()]

    def abstract_caches(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        lead = (self.shapes.pages, self.config.page_size)
        return [
            {n: jax.ShapeDtypeStruct((*lead, *a.slot_shape), self.dtype, sharding=s[n]) for n, a in layer.items()}
            for layer, s in zip(self.decoder.caches(), self.cache_shardings(), strict=True)
        ]

    def bytes_per_page(self) -> int:
        """Bytes one page takes on each device, over all layers."""
        total = 0
        for layer in self.decoder.caches():
            for a in layer.values():
                parts = self.config.tp if a.cut is not None else 1
                total += int(np.prod(a.slot_shape)) * self.config.page_size * jnp.dtype(self.dtype).itemsize // parts
        return total

    def new_caches(self) -> list[dict[str, jax.Array]]:
        """Zeroed caches, placed on the mesh."""
        abstract = self.abstract_caches()
        shardings = jax.tree.map(lambda a: a.sharding, abstract)
        make = jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract), out_shardings=shardings)
        return make()

    # -- programs

    def _whole(self, shape: tuple[int, ...], dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, REPLICATED))

    def _step(self, rows: int, requests: int, tile: int) -> Step:
        keys = self.gather_pages if tile > 1 else 0
        return Step(
            positions=self._whole((3, rows)),
            slots=self._whole((rows,)),
            lengths=self._whole((rows,)),
            tile_request=self._whole((rows // tile,)),
            page_table=self._whole((requests, self.config.pages_per_seq)),
            last_rows=self._whole((requests,)),
            key_pages=self._whole((keys,)),
            key_starts=self._whole((rows if keys else 0,)),
        )

    def _samples(self, requests: int) -> SampleArgs:
        return SampleArgs(
            temperature=self._whole((requests,), jnp.float32),
            top_p=self._whole((requests,), jnp.float32),
            seed=self._whole((requests,), jnp.uint32),
            index=self._whole((requests,)),
        )

    def _shard_map(self, body: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        # The logits' all_gather and the stripes' merge give every device the same value, which the replication check
        # cannot see for all_gather; tests compare every device's copy instead.
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def splice(self, rows: int) -> Program:
        """(state, ids [T], pool, pool_index [T]) -> (hidden [T, D], deepstack [K, T, D]). pool_index: the pool row
        of an image token, -1 for text. Without images: (state, ids) -> hidden."""
        width, levels = self.decoder.hidden_size, self.decoder.num_deepstack
        state_specs = jax.tree.map(lambda a: a.sharding.spec, self.abstract)

        def text(state, ids):
            return nnx.merge(self.graphdef, state).embed(ids)

        def mixed(state, ids, pool, pool_index):
            hidden = text(state, ids)
            is_image = (pool_index >= 0)[:, None]
            picked = pool[jnp.maximum(pool_index, 0)].astype(hidden.dtype)
            hidden = jnp.where(is_image, picked[:, :width], hidden)
            deep = jnp.where(is_image, picked[:, width:], 0).reshape(-1, levels, width)
            return hidden, jnp.moveaxis(deep, 1, 0)

        count = {"all_reduce": 1} if self.decoder.shards.vocab else {}
        if not self.shapes.pool_rows:
            fn = self._shard_map(text, (state_specs, REPLICATED), REPLICATED)
            return Program(f"splice/{rows}", jax.jit(fn), (self.abstract, self._whole((rows,))), count)
        pool = self._whole((self.shapes.pool_rows, self.shapes.pool_width), self.dtype)
        fn = self._shard_map(mixed, (state_specs, *[REPLICATED] * 3), (REPLICATED, REPLICATED))
        args = (self.abstract, self._whole((rows,)), pool, self._whole((rows,)))
        return Program(f"splice/{rows}", jax.jit(fn), args, count)

    def _pass(self, name: str, rows: int, requests: int, tile: int, selection: Selection, keep: bool) -> Program:
        embeds = tile == 1
        has_deep = not embeds and self.decoder.num_deepstack > 0
        state_specs = jax.tree.map(lambda a: a.sharding.spec, self.abstract)
        cache_specs = jax.tree.map(lambda a: a.sharding.spec, self.abstract_caches())

        def body(state, inputs, caches, step):
            decoder = nnx.merge(self.graphdef, state)
            hidden, deep = (decoder.embed(inputs), None) if embeds else inputs
            logits, caches, selections = decoder.forward(hidden, deep, caches, step, selection)
            return logits, caches, selections if keep else []

        mapped = self._shard_map(
            body, (state_specs, REPLICATED, cache_specs, REPLICATED), (REPLICATED, cache_specs, REPLICATED)
        )

        def run(state, inputs, caches, step, samples):
            logits, caches, selections = mapped(state, inputs, caches, step)
            return (sample(logits, samples), logits, caches, *([selections] if keep else []))

        whole = NamedSharding(self.mesh, REPLICATED)
        cache_out = jax.tree.map(lambda a: a.sharding, self.abstract_caches())
        fn = jax.jit(run, donate_argnums=2, out_shardings=(whole, whole, cache_out, *([whole] if keep else [])))
        width = self.decoder.hidden_size
        if embeds:
            inputs = self._whole((rows,))
        else:
            deep = self._whole((self.decoder.num_deepstack, rows, width), self.dtype) if has_deep else None
            inputs = (self._whole((rows, width), self.dtype), deep)
        args = (
            self.abstract,
            inputs,
            self.abstract_caches(),
            self._step(rows, requests, tile),
            self._samples(requests),
        )
        return Program(name, fn, args, self.decoder.collectives(embeds=embeds, selection=selection))

    def extend_name(self, rows: int, selection: Selection) -> str:
        kind = "" if self.decoder.indexer is None else "/striped" if selection.stripe_rows else "/replicated"
        return f"extend/{rows}{kind}"

    def extend(self, rows: int, selection: Selection, *, keep_selections: bool = False) -> Program:
        """(state, (hidden [T, D], deepstack [K, T, D] or None), caches, Step, SampleArgs) ->
        (tokens [R], logits [R, V], caches). keep_selections adds each full layer's [T, k] selection, for checks."""
        name = self.extend_name(rows, selection)
        return self._pass(name, rows, self.config.max_seqs, ROW_TILE, selection, keep_selections)

    def decode(self, requests: int) -> Program:
        """(state, ids [R], caches, Step, SampleArgs) -> (tokens [R], logits [R, V], caches)."""
        return self._pass(f"decode/{requests}", requests, requests, 1, Selection(None), False)

    def programs(self) -> list[Program]:
        """Everything that runs after ready."""
        made = [self.splice(t) for t in self.config.token_buckets]
        made += [self.extend(t, s) for t in self.config.token_buckets for s in self.selections]
        return made + [self.decode(b) for b in self.config.batch_buckets]
