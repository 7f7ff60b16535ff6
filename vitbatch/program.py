"""The device program of a bucket: patches of all lanes -> token rows, put into the row pool.

One jit of one shard_map. With the data-parallel encoder each device computes its own lane; the tower has no collective,
and one all-gather gives every device every row, whichever lanes hold images. Then each device writes the rows into its
copy of the pool.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt8

from vitbatch.config import Bucket, VisionConfig
from vitbatch.lanes import LaneInputs, Segments, Windows
from vitstripe import Program
from vitstripe.platform import Platform

_OPTIONS = {"xla_gpu_enable_cublaslt": True, "xla_gpu_enable_triton_gemm": False}
"""Of every program on a GPU: matmuls by cuBLASLt or hipBLASLt, which take biases, the tanh GELU and sums along. XLA's
own kernels multiply as fast, but the GELU after them takes half as long as its matmul (docs/benchmarks.md)."""


def normalise(
    patches: UInt8[Array, "C F"] | Float[Array, "C G"],
    temporal: int,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> Float[Array, "C G"]:
    """uint8 pixels of one frame [C, 3 * P * P] -> (x - 255 mean) / (255 std), the frame repeated `temporal` times:
    float32 [C, 3 * T * P * P], features (channel, frame, y, x). Rows that are float already pass unchanged."""
    if jnp.issubdtype(patches.dtype, jnp.floating):
        return patches
    shift, scale = (255 * np.array(x, np.float64).reshape(3, 1, 1) for x in (mean, std))
    pixels = patches.reshape(patches.shape[0], 3, 1, -1).astype(jnp.float32)
    pixels = (pixels - jnp.asarray(shift, jnp.float32)) / jnp.asarray(scale, jnp.float32)
    return jnp.broadcast_to(pixels, (*pixels.shape[:2], temporal, pixels.shape[3])).reshape(patches.shape[0], -1)


def build_encode(
    graphdef: Any,
    state: Any,
    vision: VisionConfig,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    mesh: Mesh | AbstractMesh,
    axis: str | None,
    platform: Platform,
):
    """The jitted function all buckets share:

    (weights, pool [S, W] donated, patches [L, C, F], lanes, dest int32 [L * C / 4]) -> (pool, rows [L, C / 4, W])

    state: what the tower was split into, arrays or their shapes; weights are its leaves. dest: the pool slot of each
    row; rows with a slot past the pool are dropped. axis: the mesh axis that lanes are dealt over, L is its size; None
    for one lane that every device computes. platform: what it is compiled for.
    """

    structure = jax.tree.structure(state)

    @jax.named_scope("encode")
    def encode(weights, pool, patches, lanes, dest):
        tower: Any = nnx.merge(graphdef, jax.tree.unflatten(structure, weights))
        lane = jax.tree.map(lambda x: x[0], lanes)
        rows = tower(normalise(patches[0], vision.temporal_patch_size, mean, std), lane, platform=platform)
        rows = rows.astype(pool.dtype)
        everyone = lax.all_gather(rows, axis, axis=0, tiled=True) if axis and mesh.shape[axis] > 1 else rows
        # Slots past the pool are distinct too (see encoder.py), so the indices are unique and the order is free.
        return pool.at[dest].set(everyone, mode="drop", unique_indices=True), rows[None]

    whole, split = PartitionSpec(), PartitionSpec(axis) if axis else PartitionSpec()
    sharded = jax.shard_map(
        encode,
        mesh=mesh,
        in_specs=(whole, whole, split, split, whole),
        out_specs=(whole, split),
        # The pool is equal on every device because all-gather made it so, which the checker cannot see; nor does it see
        # into a kernel.
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=1, compiler_options=None if platform.kind == "cpu" else _OPTIONS)


def abstract_inputs(
    vision: VisionConfig,
    num_taps: int,
    mesh: Mesh | AbstractMesh,
    axis: str | None,
    bucket: Bucket,
    dtype: Any,
) -> tuple[jax.ShapeDtypeStruct, LaneInputs[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """patches, lanes and dest of a bucket. axis: the one lanes are dealt over, None for one lane on every device.
    dtype: uint8 takes pixels of one frame, float32 normalised rows."""
    lanes = mesh.shape[axis] if axis else 1
    split = NamedSharding(mesh, PartitionSpec(axis) if axis else PartitionSpec())

    def lane_array(shape, dtype):
        return jax.ShapeDtypeStruct((lanes, *shape), dtype, sharding=split)

    features = vision.patch_pixels if jnp.dtype(dtype) == jnp.uint8 else vision.patch_features
    capacity, blocks, cells = bucket.capacity, bucket.blocks, bucket.capacity // vision.patches_per_token
    windows = Windows(*(lane_array((cells,), jnp.int32) for _ in range(3))) if vision.window_cells else None
    inputs = LaneInputs(
        positions=lane_array((capacity, 2), jnp.int32),
        tap_index=lane_array((capacity, num_taps), jnp.int32),
        tap_weight=lane_array((capacity, num_taps), jnp.float32),
        segments=Segments(lane_array((blocks,), jnp.int32), lane_array((blocks,), jnp.int32)),
        windows=windows,
    )
    dest = jax.ShapeDtypeStruct((lanes * cells,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return lane_array((capacity, features), dtype), inputs, dest


def bucket_program(
    encode: Any,
    state: Any,
    pool: jax.ShapeDtypeStruct,
    vision: VisionConfig,
    num_taps: int,
    mesh: Mesh | AbstractMesh,
    axis: str | None,
    bucket: Bucket,
    dtype: Any = jnp.uint8,
) -> Program:
    """The Program of one bucket. encode: from `build_encode`, with the same axis. state: pytree of ShapeDtypeStruct
    with shardings, whose leaves are the weights."""
    inputs = abstract_inputs(vision, num_taps, mesh, axis, bucket, dtype)
    gathers = axis is not None and mesh.shape[axis] > 1
    return Program(
        f"vision/{bucket}", encode, (tuple(jax.tree.leaves(state)), pool, *inputs), {"all_gather": int(gathers)}
    )
