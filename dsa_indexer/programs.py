"""The device programs of an indexer at given sizes: what warm-up, ahead-of-time compilation and the ROCm checks read.

A model that calls the functions inside programs of its own lists those instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dsa_indexer.chunks import LOGITS_BYTES
from dsa_indexer.config import IndexerConfig, StripeConfig
from dsa_indexer.indexer import Indexer
from dsa_indexer.key_cache import gather_keys, store_keys
from dsa_indexer.paged import topk_paged
from dsa_indexer.pooled import PooledIndexer, PoolTail, expand_pools
from dsa_indexer.quant import KeyFormat, encode_keys, encode_queries
from dsa_indexer.replicated import topk_rows
from dsa_indexer.rows import RowBatch
from dsa_indexer.sparse_mla import LatentRows, sparse_mla
from dsa_indexer.striped import striped_topk_rows
from vitstripe import Program, require_auto_axis
from vitstripe.platform import Platform, platform_of_mesh

Module = TypeVar("Module", Indexer, PooledIndexer)

_COLLECTIVES = {"pmax": "all_reduce", "all_gather": "all_gather"}


@dataclass(frozen=True)
class LatentShape:
    """The attention that reads the selection: heads on a device, C = width of a cached row, V = value_dim of it. form:
    how latents are cached, None for the dtype of the rest."""

    heads: int
    width: int
    value_dim: int
    scale: float
    form: KeyFormat | None = None


@dataclass(frozen=True)
class IndexerShapes:
    """The sizes the programs are compiled for.

    rows: M, query rows of a prefill pass; their keys come from key_pages pages of the cache, N = key_pages * page_size.
    requests, rows_per_request, pages_per_request: a decode pass.
    pages, page_size: the cache of index keys. With pooled keys a page holds page_size pools.
    """

    rows: int
    key_pages: int
    requests: int
    pages: int
    page_size: int
    pages_per_request: int
    rows_per_request: int = 1

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"IndexerShapes.{name} is {value}; it must be at least 1")


def programs(
    config: IndexerConfig,
    shapes: IndexerShapes,
    mesh: Mesh | AbstractMesh,
    *,
    axis: str = "tp",
    dtype=jnp.bfloat16,
    form: KeyFormat | None = None,
    stripes: StripeConfig | None = None,
    latent: LatentShape | None = None,
    logits_bytes: int = LOGITS_BYTES,
    platform: Platform | None = None,
) -> list[Program]:
    """One full layer's programs, all arguments replicated over the mesh.

        indexer/project     (state, x, q_lora, cos, sin) -> q, gates, keys, key_scales
                            (state, x, q_lora, cos, sin, tail, request, positions) for pooled keys -> ..., token, tail
        indexer/store       (pages, keys, slots), once more for the scales of float8 keys; pages are donated
        indexer/gather      (pages, page_ids), once more for the scales
        indexer/replicated  (q, gates, keys, key_scales, rows) -> indices
        indexer/striped     the same over the mesh; only there if the axis has more than one device
        indexer/paged       (q, gates, pages, scale_pages, page_table, lengths) -> indices
        indexer/expand      (pools, lengths) -> tokens; only there for pooled keys
        indexer/sparse_mla  (q, kv, indices) -> values, kv LatentRows for latents in float8; only there if `latent` is
                            given

    dtype: of the parameters and hidden states. form: of queries and keys in the cache. cos and sin are None for a
    config without rotation. key_scales and scale_pages are None unless the keys are float8.
    platform: what they are compiled for, None for that of the mesh.
    Raises ValueError if the mesh lacks the axis or the axis is not Auto.
    """
    form, stripes = form or KeyFormat(), stripes or StripeConfig()
    tp = require_auto_axis(mesh, axis)
    platform = platform or platform_of_mesh(mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    s, H, D, k = shapes, config.num_heads, config.head_dim, config.selected
    key_dtype, floats = form.jax_dtype or jnp.dtype(dtype), partial(array, dtype=jnp.float32)
    pages = array(s.pages, s.page_size, D, dtype=key_dtype)
    scale_pages = floats(s.pages, s.page_size) if form.is_fp8 else None
    num_keys = s.key_pages * s.page_size

    def program(
        name: str, fn, *args: Any, donate: tuple[int, ...] = (), collectives: dict[str, int] | None = None
    ) -> Program:
        return Program(f"indexer/{name}", jax.jit(fn, donate_argnums=donate), args, collectives or {})

    found = [_project(config, shapes, array, program, dtype, form)]
    for suffix, stored in (("", pages), ("_scales", scale_pages)):
        if stored is not None:
            new = array(s.rows, *stored.shape[2:], dtype=stored.dtype)
            found.append(program(f"store{suffix}", store_keys, stored, new, array(s.rows), donate=(0,)))
            found.append(program(f"gather{suffix}", gather_keys, stored, array(s.key_pages)))

    batch = (
        array(s.rows, H, D, dtype=key_dtype),
        floats(s.rows, H),
        array(num_keys, D, dtype=key_dtype),
        floats(num_keys) if form.is_fp8 else None,
        RowBatch(array(s.rows), array(s.rows)),
    )

    def on_every_device(fn: Callable[..., Array]) -> Callable[..., Array]:
        """The partitioner knows nothing of what happens inside a kernel, so it is not asked: each device runs its own.
        The checker of varying axes knows as little."""
        if tp == 1 or not platform.runs_kernels:
            return fn
        whole = PartitionSpec()
        return jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)

    options = {"k": k, "forced": config.forced, "logits_bytes": logits_bytes, "platform": platform}
    found.append(program("replicated", on_every_device(partial(topk_rows, **options)), *batch))
    if tp > 1:
        striped = partial(striped_topk_rows, mesh=mesh, axis=axis, stripes=stripes, **options)
        found.append(program("striped", striped, *batch, collectives={_COLLECTIVES[stripes.merge]: 1}))

    def decode(q: Array, gates: Array, pages: Array, scale_pages: Array | None, table: Array, lengths: Array) -> Array:
        return topk_paged(q, gates, pages, table, lengths, scale_pages=scale_pages, **options)

    B, n = s.requests, s.rows_per_request
    step = (array(B, n, H, D, dtype=key_dtype), floats(B, n, H), pages, scale_pages)
    found.append(program("paged", on_every_device(decode), *step, array(B, s.pages_per_request), array(B, n)))
    if config.pool is not None:
        found.append(program("expand", partial(expand_pools, pool=config.pool), array(s.rows, k), array(s.rows)))
    if latent is not None:
        attend = partial(sparse_mla, scale=latent.scale, value_dim=latent.value_dim, platform=platform)
        q = array(s.rows, latent.heads, latent.width, dtype=dtype)
        slots = s.pages * s.page_size * (config.pool or 1)
        kv = array(slots, latent.width, dtype=dtype)
        if latent.form is not None and latent.form.is_fp8:
            values = array(slots, latent.value_dim, dtype=latent.form.jax_dtype)
            rest = array(slots, latent.width - latent.value_dim, dtype=dtype)
            kv = LatentRows(values, floats(slots), rest if rest.size else None)
        found.append(program("sparse_mla", on_every_device(attend), q, kv, array(s.rows, config.width)))
    return found


def _project(config: IndexerConfig, s: IndexerShapes, array, program, dtype, form: KeyFormat) -> Program:
    half = config.rope_dim // 2
    angles = (array(s.rows, half, dtype=jnp.float32),) * 2 if half else (None, None)
    inputs = (array(s.rows, config.hidden_size, dtype=dtype), array(s.rows, config.q_lora_rank, dtype=dtype), *angles)

    def split(kind: type[Module]) -> tuple[nnx.GraphDef[Module], Any]:
        graphdef, state = nnx.split(nnx.eval_shape(lambda: kind(config, dtype)))
        return graphdef, jax.tree.map(lambda leaf: array(*leaf.shape, dtype=leaf.dtype), state)

    if config.pool is None:
        one_a_token, state = split(Indexer)

        def tokens(state, x, q_lora, cos, sin):
            indexer = nnx.merge(one_a_token, state)
            queries = encode_queries(*indexer.queries(x, q_lora, cos, sin), form)
            return *queries, *encode_keys(indexer.keys(x, cos, sin), form)

        return program("project", tokens, state, *inputs)

    one_a_pool, state = split(PooledIndexer)

    def pools(state, x, q_lora, cos, sin, tail, request, positions):
        indexer = nnx.merge(one_a_pool, state)
        queries = encode_queries(*indexer.queries(x, q_lora, cos, sin), form)
        keys, scores = indexer.token_keys(x, cos, sin)
        closed, tail = indexer.close(tail, keys, scores, request, positions)
        return *queries, *encode_keys(closed.keys, form), closed.token, tail

    waiting = array(s.requests, config.pool, config.head_dim, dtype=dtype)
    tail = PoolTail(waiting, waiting)
    return program("project", pools, state, *inputs, tail, array(s.rows), array(s.rows), donate=(5,))
