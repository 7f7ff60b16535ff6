"""The indexer's kernels against plain XLA on the devices at hand."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_indexer.config import IndexerConfig
from dsa_indexer.paged import topk_paged
from dsa_indexer.replicated import topk_rows
from dsa_indexer.rows import RowBatch
from vitstripe.platform import PLAIN, Platform, platform_of_mesh

_ROWS = 37  # no whole number of any kernel's row tiles


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

    expected = selected(contiguous, PLAIN)
    for name, way in (("contiguous", contiguous), ("paged", paged)):
        for (device, ours), (_, theirs) in zip(selected(way, platform), expected, strict=True):
            if wrong := int((ours != theirs).any(-1).sum()):
                raise RuntimeError(
                    f"the indexer's kernels select other {name} keys than plain XLA in {wrong} of {_ROWS} rows on "
                    f"{device} ({platform.name or platform.kind}): they give wrong results with jax {jax.__version__} "
                    f"and jaxlib {version('jaxlib')}; please report it. Another jaxlib may give right ones; "
                    f"JAX_PLATFORMS=cpu serves without kernels and without the GPU"
                )
