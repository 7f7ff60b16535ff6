"""What is tried on the devices before a model with an indexer is served: its kernels and its stripes. A compiler or a
collective that does not work here must not be found out by wrong answers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dsa_indexer import (
    RowBatch,
    StripeConfig,
    check_kernels,
    encode_keys,
    encode_queries,
    striped_topk_rows,
    topk_rows,
)
from serving.lm import LanguageModel

_FLOAT32_APART, _SHORT_FLOAT_APART = 1e-2, 0.5
"""Most that the logits of two passes may lie apart, as a share of their norm. The selections are the same bits, see
`check_stripes`; but the passes are compiled each for itself, with other matrix products, say, and in 16 bits a pass of
four layers was 0.01 of its largest logit apart on two H200. More layers, and experts that change places, make it more.
So only what has little in common is taken for a fault there."""


def check_indexer(lm: LanguageModel, stripes: StripeConfig) -> None:
    """Compares the indexer's kernels with plain XLA and its striped form with the replicated one, where this model and
    mesh have them. Raises RuntimeError where they differ."""
    indexer = lm.decoder.indexer
    if indexer is None:
        return
    if lm.platform.runs_kernels:
        assert isinstance(lm.mesh, Mesh)  # on an abstract one nothing runs
        page_size = lm.config.page_size // (indexer.pool or 1)
        dtype = lm.decoder.formats.index_keys.jax_dtype or lm.dtype
        check_kernels(indexer, lm.mesh, dtype=dtype, page_size=page_size, platform=lm.platform)
    if len(lm.selections) > 1:
        check_stripes(lm, stripes)


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

    form = lm.decoder.formats.index_keys
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


def check_passes(logits: Sequence[np.ndarray], rows: int, dtype: DTypeLike) -> None:
    """Compares the logits [V] that a warm-up prompt of `rows` tokens was given, replicated first, then striped. dtype:
    of the weights. Raises RuntimeError where they are not finite or too far apart."""
    first = np.asarray(logits[0], np.float32)
    norm = float(np.linalg.norm(first))
    if not np.isfinite(norm):
        raise RuntimeError(
            f"the decoder's logits for a warm-up prompt of {rows} tokens are not finite; check the checkpoint"
        )
    most = _FLOAT32_APART if jnp.dtype(dtype).itemsize > 2 else _SHORT_FLOAT_APART
    for other in logits[1:]:
        apart = float(np.linalg.norm(other - first)) / max(norm, 1e-6)
        if not apart <= most:
            raise RuntimeError(
                f"the striped indexer disagrees with the replicated one on this machine (logits lie {apart:.1e} of "
                f"their norm apart at {rows} rows, at most {most:g} is usual); start with --no-indexer-stripes and "
                "report it"
            )
