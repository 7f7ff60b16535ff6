"""Score and select with the rows striped over a mesh axis.

Each device takes its stripes out of the replicated rows, scores and selects them in one launch, and one collective
gives every device the whole selection. The bits are those of `topk_rows`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from dsa_indexer.chunks import LOGITS_BYTES
from dsa_indexer.config import StripeConfig
from dsa_indexer.projection import Project, project_rows
from dsa_indexer.replicated import topk_rows
from dsa_indexer.rows import RowBatch, require_rows
from dsa_indexer.stripes import deal_back, place_owned, take_owned
from dsa_indexer.topk import NOTHING_FORCED, ForcedTokens, require_k
from vitstripe import require_auto_axis
from vitstripe.platform import Platform, platform_of_mesh

_DEFAULT_STRIPES = StripeConfig()


def striped_topk_projected_local(
    project: Project,
    inputs: Any,
    keys: Float[Array, "N D"],
    key_scales: Float32[Array, "N"] | None,
    rows: RowBatch,
    *,
    k: int,
    axis: str,
    tp: int,
    stripes: StripeConfig = _DEFAULT_STRIPES,
    forced: ForcedTokens = NOTHING_FORCED,
    logits_bytes: int = LOGITS_BYTES,
    platform: Platform | None = None,
) -> Int32[Array, "M k"]:
    """The body of `striped_topk_projected`, for callers already inside a shard_map over mesh axis `axis` of size tp."""
    return _striped(
        partial(project_rows, project, batch=rows.ks.shape[0], platform=platform),
        inputs,
        keys,
        key_scales,
        rows,
        k=k,
        axis=axis,
        tp=tp,
        stripes=stripes,
        forced=forced,
        logits_bytes=logits_bytes,
        platform=platform,
    )


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
    forced: ForcedTokens = NOTHING_FORCED,
    logits_bytes: int = LOGITS_BYTES,
    platform: Platform | None = None,
) -> Int32[Array, "M k"]:
    """The body of `striped_topk_rows`, for callers already inside a shard_map over mesh axis `axis` of size tp.

    All arguments are replicated over the axis, and so is the result. In plain XLA with merge="pmax" the type checker of
    shard_map knows that; with merge="all_gather" and on a GPU the enclosing shard_map needs check_vma=False, because
    JAX types the result of an all-gather as varying and that of a kernel not at all. No row or no key: no collective.
    """
    return _striped(
        lambda inputs: inputs,
        (q, gates),
        keys,
        key_scales,
        rows,
        k=k,
        axis=axis,
        tp=tp,
        stripes=stripes,
        forced=forced,
        logits_bytes=logits_bytes,
        platform=platform,
    )


def _striped(
    queries: Callable[[Any], tuple[Array, Array]],
    inputs: Any,
    keys: Array,
    key_scales: Array | None,
    rows: RowBatch,
    *,
    k: int,
    axis: str,
    tp: int,
    stripes: StripeConfig,
    forced: ForcedTokens,
    logits_bytes: int,
    platform: Platform | None,
) -> Array:
    require_k(k)
    num_rows, num_keys = jax.tree.leaves(inputs)[0].shape[0], keys.shape[0]
    require_rows(rows, num_rows)
    if num_rows == 0 or num_keys == 0:
        return jnp.full_like(rows.ks, -1, shape=(num_rows, k))
    # Fewer rows than a stripe all belong to device 0. A stripe of just these rows says the same with less padding.
    stripe = min(stripes.rows, num_rows)
    device = lax.axis_index(axis)
    inputs, ks, lengths = jax.tree.map(lambda x: take_owned(x, device, stripe, tp), (inputs, rows.ks, rows.lengths))
    q, gates = queries(inputs)
    width = min(k, num_keys)  # columns past it are -1 in any case and need not travel
    own = topk_rows(
        q,
        gates,
        keys,
        key_scales,
        RowBatch(ks, lengths),
        k=width,
        forced=forced,
        logits_bytes=logits_bytes,
        platform=platform,
    )
    with jax.named_scope("merge"):
        if stripes.merge == "pmax":
            merged = lax.pmax(place_owned(own, device, num_rows, stripe, tp, fill=-1), axis)
        else:
            merged = deal_back(lax.all_gather(own, axis), num_rows, stripe, tp)
    return jnp.pad(merged, [(0, 0), (0, k - width)], constant_values=-1)


def _everywhere(
    body: Callable[..., Array], mesh: Mesh | AbstractMesh, stripes: StripeConfig, platform: Platform
) -> Callable[..., Array]:
    # An all-gather's result counts as varying, and of a kernel's result the checker knows nothing, so it would refuse
    # the replicated output. Tests compare every device's copy instead.
    checked = stripes.merge == "pmax" and not platform.runs_kernels
    replicated = PartitionSpec()
    return jax.shard_map(body, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=checked)


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
    forced: ForcedTokens = NOTHING_FORCED,
    logits_bytes: int = LOGITS_BYTES,
    platform: Platform | None = None,
) -> Int32[Array, "M k"]:
    """`topk_rows` with its rows striped over mesh axis `axis`; the same bits, on every device. Meant to be jitted.

    Inputs and result are replicated over the mesh. Any M: rows are padded to whole stripes with rows of length 0.
    Whether striping pays is the caller's question (`engages`); it is right in any case. logits_bytes counts a device's
    scores. platform: what it is compiled for, None for that of the mesh. One collective: an all-reduce (max) or an
    all-gather.

    Raises ValueError if the mesh lacks the axis or the axis is not Auto, and as `topk_rows` does.
    """
    tp = require_auto_axis(mesh, axis)
    platform = platform or platform_of_mesh(mesh)

    def body(q: Array, gates: Array, keys: Array, key_scales: Array | None, rows: RowBatch) -> Array:
        return striped_topk_rows_local(
            q,
            gates,
            keys,
            key_scales,
            rows,
            k=k,
            axis=axis,
            tp=tp,
            stripes=stripes,
            forced=forced,
            logits_bytes=logits_bytes,
            platform=platform,
        )

    return _everywhere(body, mesh, stripes, platform)(q, gates, keys, key_scales, rows)


def striped_topk_projected(
    project: Project,
    inputs: Any,
    keys: Float[Array, "N D"],
    key_scales: Float32[Array, "N"] | None,
    rows: RowBatch,
    *,
    k: int,
    mesh: Mesh | AbstractMesh,
    axis: str = "tp",
    stripes: StripeConfig = _DEFAULT_STRIPES,
    forced: ForcedTokens = NOTHING_FORCED,
    logits_bytes: int = LOGITS_BYTES,
    platform: Platform | None = None,
) -> Int32[Array, "M k"]:
    """`striped_topk_rows` with the rows cut before they are projected, so that each device projects its own alone.

    project(*inputs) gives the queries and gates of the tokens whose arrays `inputs` holds, [M, ...] each: for an
    `Indexer`, its method queries with x, q_lora, cos and sin. Weights that it closes over count as replicated.
    The bits are those of topk_rows(*project_rows(project, inputs), ...); `PROJECTION_ROWS` says for which stripes that
    holds by construction. The rest as in `striped_topk_rows`.
    """
    tp = require_auto_axis(mesh, axis)
    platform = platform or platform_of_mesh(mesh)

    def body(inputs: Any, keys: Array, key_scales: Array | None, rows: RowBatch) -> Array:
        return striped_topk_projected_local(
            project,
            inputs,
            keys,
            key_scales,
            rows,
            k=k,
            axis=axis,
            tp=tp,
            stripes=stripes,
            forced=forced,
            logits_bytes=logits_bytes,
            platform=platform,
        )

    return _everywhere(body, mesh, stripes, platform)(inputs, keys, key_scales, rows)
