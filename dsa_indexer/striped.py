"""Score and select with the rows striped over a mesh axis.

Each device takes its stripes out of the replicated rows, scores and selects them in one launch, and one collective
gives every device the whole selection. The bits are those of `topk_rows`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from dsa_indexer.chunks import LOGITS_BYTES
from dsa_indexer.config import StripeConfig
from dsa_indexer.replicated import topk_rows
from dsa_indexer.rows import RowBatch, require_rows
from dsa_indexer.stripes import deal_back, place_owned, take_owned
from dsa_indexer.topk import require_k
from vitstripe import require_auto_axis

_DEFAULT_STRIPES = StripeConfig()


def striped_topk_rows_local(
    q: Float[Array, "M H D"],
    gates: Float32[Array, "M H"],
    keys: Float[Array, "N D"],
    key_scales: Float32[Array, "N"] | None,
    rows: RowBatch,
    *,
    k: int,
    axis: str,
    tp: int,
    stripes: StripeConfig = _DEFAULT_STRIPES,
    logits_bytes: int = LOGITS_BYTES,
) -> Int32[Array, "M k"]:
    """The body of `striped_topk_rows`, for callers already inside a shard_map over mesh axis `axis` of size tp.

    All arguments are replicated over the axis, and so is the result. With merge="pmax" the type checker of shard_map
    knows that; with merge="all_gather" the enclosing shard_map needs check_vma=False, because JAX types the
    result of an all-gather as varying. No row or no key: no collective.
    """
    require_k(k)
    num_rows, num_keys = q.shape[0], keys.shape[0]
    require_rows(rows, num_rows)
    if num_rows == 0 or num_keys == 0:
        return jnp.full_like(rows.ks, -1, shape=(num_rows, k))
    # Fewer rows than a stripe all belong to device 0. A stripe of just these rows says the same with less padding.
    stripe = min(stripes.rows, num_rows)
    device = lax.axis_index(axis)
    q, gates, ks, lengths = (take_owned(x, device, stripe, tp) for x in (q, gates, rows.ks, rows.lengths))
    width = min(k, num_keys)  # columns past it are -1 in any case and need not travel
    own = topk_rows(q, gates, keys, key_scales, RowBatch(ks, lengths), k=width, logits_bytes=logits_bytes)
    if stripes.merge == "pmax":
        merged = lax.pmax(place_owned(own, device, num_rows, stripe, tp, fill=-1), axis)
    else:
        merged = deal_back(lax.all_gather(own, axis), num_rows, stripe, tp)
    return jnp.pad(merged, [(0, 0), (0, k - width)], constant_values=-1)


def striped_topk_rows(
    q: Float[Array, "M H D"],
    gates: Float32[Array, "M H"],
    keys: Float[Array, "N D"],
    key_scales: Float32[Array, "N"] | None,
    rows: RowBatch,
    *,
    k: int,
    mesh: Mesh | AbstractMesh,
    axis: str = "tp",
    stripes: StripeConfig = _DEFAULT_STRIPES,
    logits_bytes: int = LOGITS_BYTES,
) -> Int32[Array, "M k"]:
    """`topk_rows` with its rows striped over mesh axis `axis`; the same bits, on every device. Meant to be jitted.

    Inputs and result are replicated over the mesh. Any M: rows are padded to whole stripes with rows of length 0.
    Whether striping pays is the caller's question (`engages`); it is right in any case. logits_bytes counts a device's
    scores. One collective: an all-reduce (max) or an all-gather.

    Raises ValueError if the mesh lacks the axis or the axis is not Auto, and as `topk_rows` does.
    """
    tp = require_auto_axis(mesh, axis)

    def body(q: Array, gates: Array, keys: Array, key_scales: Array | None, rows: RowBatch) -> Array:
        return striped_topk_rows_local(
            q, gates, keys, key_scales, rows, k=k, axis=axis, tp=tp, stripes=stripes, logits_bytes=logits_bytes
        )

    # An all-gather's result counts as varying, so the checker would refuse the replicated output. Tests compare
    # every device's copy instead.
    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=stripes.merge == "pmax"
    )
    return mapped(q, gates, keys, key_scales, rows)
