"""What is tried on the devices before a model with an indexer is served: its kernels and its stripes. A compiler or a
collective that does not work here must not be found out by wrong answers."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_indexer import (
    IndexerConfig,
    RowBatch,
    StripeConfig,
    encode_keys,
    encode_queries,
    striped_topk_rows,
    topk_paged,
    topk_rows,
)
from serving.lm import LanguageModel
from vitstripe.platform import Platform, platform_of_mesh

_PLAIN = Platform("cpu", "", "")  # plain XLA, whatever it is compiled for
_ROWS = 37  # no whole number of any kernel's row tiles


def check_indexer(lm: LanguageModel, stripes: StripeConfig) -> None:
    """Compares the indexer's kernels with plain XLA and its striped form with the replicated one, where this model and
    mesh have them. Raises RuntimeError where they differ."""
    indexer = lm.decoder.indexer
    if indexer is None:
        return
    if lm.platform.runs_kernels:
        assert isinstance(lm.mesh, Mesh)  # on an abstract one nothing runs
        page_size = lm.config.page_size // (indexer.pool or 1)
        dtype = lm.decoder.index_keys.jax_dtype or lm.dtype
        check_kernels(indexer, lm.mesh, dtype=dtype, page_size=page_size, platform=lm.platform)
    if len(lm.selections) > 1:
        check_stripes(lm, stripes)


def check_kernels(
    indexer: IndexerConfig, mesh: Mesh, *, dtype: jax.typing.DTypeLike, page_size: int, platform: Platform | None = None
) -> None:
    """Selects from made-up keys, twice as many as the indexer keeps, on every device of the mesh: by the kernels, from
    contiguous and from paged keys, and in plain XLA. Raises RuntimeError when one bit differs.

    All numbers are small and whole, so that every sum is exact in float32, in any order. dtype: of queries and keys;
    float8 keys have scales. page_size: keys of a page. platform: what the kernels are compiled for, None for that of
    the mesh.
    """
    k, platform = indexer.selected, platform or platform_of_mesh(mesh)
    pages = -(-2 * k // page_size)
    keys, width = pages * page_size, indexer.head_dim
    draw, whole = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec())

    def numbers(most: int, *shape: int) -> jax.Array:
        return jax.device_put(draw.integers(-most, most + 1, shape).astype(np.float32), whole)

    q, gates = numbers(2, _ROWS, indexer.num_heads, width).astype(dtype), numbers(3, _ROWS, indexer.num_heads)
    key_pages = numbers(2, pages, page_size, width).astype(dtype)
    scale_pages = numbers(1, pages, page_size) + 2 if key_pages.dtype.itemsize == 1 else None
    table = jax.device_put(draw.permutation(pages).astype(np.int32), whole)
    lengths = jax.device_put(np.linspace(1, keys, _ROWS).astype(np.int32), whole)

    def contiguous(platform: Platform, q, gates, key_pages, scale_pages, table, lengths):
        rows = RowBatch(ks=jnp.zeros_like(lengths), lengths=lengths)
        in_order = key_pages[table].reshape(keys, width)
        scales = None if scale_pages is None else scale_pages[table].reshape(keys)
        return topk_rows(q, gates, in_order, scales, rows, k=k, forced=indexer.forced, platform=platform)

    def paged(platform: Platform, q, gates, key_pages, scale_pages, table, lengths):
        tables = jnp.broadcast_to(table, (_ROWS, pages))
        one_each = (q[:, None], gates[:, None], key_pages, tables, lengths[:, None])
        options = {"scale_pages": scale_pages, "forced": indexer.forced, "platform": platform}
        return topk_paged(*one_each, k=k, **options)[:, 0]

    def selected(way: Callable[..., jax.Array], platform: Platform) -> list[tuple[jax.Device, np.ndarray]]:
        replicated = PartitionSpec()
        run = jax.shard_map(
            partial(way, platform), mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
        )
        found = jax.jit(run)(q, gates, key_pages, scale_pages, table, lengths)
        return [(shard.device, np.asarray(shard.data)) for shard in found.addressable_shards]

    expected = selected(contiguous, _PLAIN)
    for name, way in (("contiguous", contiguous), ("paged", paged)):
        for (device, ours), (_, theirs) in zip(selected(way, platform), expected, strict=True):
            if wrong := int((ours != theirs).any(-1).sum()):
                raise RuntimeError(
                    f"the indexer's kernels select other {name} keys than plain XLA in {wrong} of {_ROWS} rows on "
                    f"{device} ({platform.name or platform.kind}): they give wrong results with jax {jax.__version__} "
                    f"and jaxlib {version('jaxlib')}; please report it. Another jaxlib may give right ones; "
                    f"JAX_PLATFORMS=cpu serves without kernels and without the GPU"
                )


def check_stripes(lm: LanguageModel, stripes: StripeConfig) -> None:
    """Runs the indexer's scoring, selection and merge on made-up keys, twice as many as it keeps, replicated and
    striped, and compares every device's selection. Raises RuntimeError when one bit differs."""
    c = lm.decoder.indexer
    assert c is not None
    rows, keys, k = stripes.rows * lm.config.tp + 5, 2 * c.selected, c.selected
    draw = iter(jax.random.split(jax.random.key(0), 3))
    whole = NamedSharding(lm.mesh, PartitionSpec())

    def normal(*shape: int) -> jax.Array:
        return jax.device_put(jax.random.normal(next(draw), shape, jnp.float32), whole)

    form = lm.decoder.index_keys
    q, gates = normal(rows, c.num_heads, c.head_dim).astype(lm.dtype), normal(rows, c.num_heads)
    q, gates = encode_queries(q, gates, form)
    index_keys, scales = encode_keys(normal(keys, c.head_dim).astype(lm.dtype), form)
    lengths = jax.device_put(np.linspace(1, keys, rows).astype(np.int32), whole)
    batch = RowBatch(ks=jnp.zeros_like(lengths), lengths=lengths)
    args = (q, gates, index_keys, scales, batch)
    expected = np.asarray(jax.jit(lambda *a: topk_rows(*a, k=k, forced=c.forced))(*args))
    striped = jax.jit(
        lambda *a: striped_topk_rows(*a, k=k, forced=c.forced, mesh=lm.mesh, axis=lm.axis, stripes=stripes)
    )
    for shard in striped(*args).addressable_shards:
        wrong = int((np.asarray(shard.data) != expected).any(-1).sum())
        if wrong:
            raise RuntimeError(
                f"the striped indexer selects other keys than the replicated one in {wrong} of {rows} rows on "
                f"{shard.device}; start with --no-indexer-stripes and report it"
            )
