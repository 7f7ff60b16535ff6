"""VisionEncoder: the images of many requests in one call, with one program a bucket and a row pool on the device."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int
from PIL import Image

from vitbatch import checkpoint as checkpoints
from vitbatch.cache import EmbeddingCache, PoolFull
from vitbatch.compile_guard import run_compiled
from vitbatch.config import ATTENTION_BLOCK, BucketLadder, EncoderConfig, VisionConfig, activation_bytes
from vitbatch.gate import BatchDecision, decide_batching
from vitbatch.images import ImageError, ImageProcessor, PreparedImage
from vitbatch.planning import CallPlan, attention_cost, lay_out, plan_calls
from vitbatch.program import bucket_program, build_encode
from vitbatch.towers import family_of
from vitbatch.warmup import BucketReport, Compilation, Progress, WarmupReport, compile_all
from vitstripe import Program, require_auto_axis
from vitstripe.checkpoint import Checkpoint, load, raise_problems
from vitstripe.checkpoint import Progress as LoadProgress
from vitstripe.platform import platform_of

logger = logging.getLogger("vitbatch.encoder")

_MIN_POOL_TOKENS = 1024
_POOL_IMAGES = 4

# Not one image a bucket: attention over 65536 patches would take seconds a launch and prove nothing more.
_WARM_IMAGE_PATCHES = 1024

# Query blocks side by side in attention: a CPU gains nothing from more, a GPU needs many to be full.
_CPU_CHUNK, _GPU_CHUNK = 8, 64

# What a lane at least holds, whatever the largest image: a GPU wants many rows a launch, a CPU's caches hold no more.
_GPU_LEAST_TOP, _CPU_LEAST_TOP = 16384, 2048

# A cache of keys and values sized from what is free after warm-up commonly takes 80 % of it.
_GPU_MEMORY_SHARE = 0.15

# Grids whose position taps are kept; servers see the same few sizes again and again.
_KEPT_GRIDS = 64

_ARGUMENTS = ("state", "pool", "patches", "lanes", "dest")

AnyImage = Image.Image | bytes | np.ndarray | PreparedImage


@dataclass(frozen=True)
class CallStats:
    """One encoder call. call_id: running number from 1. bucket: patches a lane. patches: real ones.
    padded_ratio: share of the computed patches that are padding. imbalance: patches of the fullest lane over the mean.
    seconds: from dispatch until its rows were ready."""

    call_id: int
    images: int
    lanes: int
    lanes_filled: int
    bucket: int
    patches: int
    padded_ratio: float
    imbalance: float
    seconds: float


@dataclass(frozen=True)
class EncodedImages:
    """Where the rows of the given images are in the pool, in the order given.

    slots: int32 [tokens] an image. calls: the encoder calls that ran. call_of: index into `calls` of the one that
    encoded each image, None where the rows were there already.
    """

    slots: list[np.ndarray]
    calls: list[CallStats]
    call_of: list[int | None]

    @property
    def padded_ratio(self) -> float:
        """Share of the patches computed by all the calls that are padding; 0 without a call."""
        computed = sum(call.lanes * call.bucket for call in self.calls)
        return 1 - sum(call.patches for call in self.calls) / computed if computed else 0.0


@dataclass(frozen=True)
class Frame:
    """What a call encodes: patch rows (uint8 pixels of one frame, or normalised floats) and their (gh, gw) grid."""

    rows: np.ndarray
    grid: tuple[int, int]


class VisionEncoder:
    """Encodes images on a mesh. Not thread-safe: one thread drives the devices (`processor` may be used from any).

    processor: prepares images. pool: the device array of rows. cache: who owns which slot, with its statistics.
    """

    def __init__(
        self,
        graphdef: Any,
        state: nnx.State,
        vision_config: VisionConfig,
        processor: ImageProcessor,
        mesh: Mesh,
        axis: str = "tp",
        config: EncoderConfig | None = None,
    ):
        """graphdef, state: the tower, split, its state replicated over `mesh`."""
        config = config or EncoderConfig()
        width = require_auto_axis(mesh, axis)
        self.vision_config, self.processor = vision_config, processor
        self.mesh, self.axis, self.config = mesh, axis, config
        self.lanes = width if config.dp_encoder else 1
        self._lane_axis = axis if config.dp_encoder else None
        self._family = family_of(vision_config.model_type)
        self._state = state
        self._abstract_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        platform = platform_of(mesh.devices.flat[0])
        self.dtype = jnp.dtype(platform.default_dtype if config.dtype is None else config.dtype)
        self.ladder = config.ladder or self._choose_ladder()
        self._lane_patches = _CPU_LEAST_TOP if platform.kind == "cpu" else None
        self._quadratic = attention_cost(vision_config) if config.quadratic_lanes else 0.0
        self._taps = lru_cache(_KEPT_GRIDS)(lambda gh, gw: self._family.position_taps(vision_config, gh, gw))
        self._decision: BatchDecision | None = None
        self._encode = build_encode(
            graphdef,
            vision_config,
            processor.mean,
            processor.std,
            mesh,
            self._lane_axis,
            chunk=_CPU_CHUNK if platform.kind == "cpu" else _GPU_CHUNK,
        )
        largest = min(self.ladder.largest, processor.largest_image_patches) // vision_config.patches_per_token
        row_bytes = self.row_width * self.dtype.itemsize
        tokens = config.pool_tokens or max(_MIN_POOL_TOKENS, _POOL_IMAGES * largest)
        if config.pool_bytes is not None:
            tokens = config.pool_bytes // row_bytes
            if not tokens:
                raise ValueError(f"pool_bytes {config.pool_bytes} is less than one row of {row_bytes} bytes; raise it")
        self.cache = EmbeddingCache(tokens, row_bytes)
        self._pool_shape = jax.ShapeDtypeStruct(
            (self.cache.capacity, self.row_width), self.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        )
        self._pool = _zeros(self._pool_shape)
        self._compiled: dict[tuple[int, str], Compilation] = {}
        self._calls = 0

    def _choose_ladder(self) -> BucketLadder:
        """Room for the largest image and many small ones, within the memory given."""
        device, largest = self.mesh.devices.flat[0], self.processor.largest_image_patches
        on_cpu = platform_of(device).kind == "cpu"
        memory = self.config.memory_bytes
        if memory is None and not on_cpu and (stats := device.memory_stats()):
            memory = int((stats["bytes_limit"] - stats["bytes_in_use"]) * _GPU_MEMORY_SHARE)
        longest = None
        if memory is not None:
            patch_bytes = activation_bytes(self.vision_config, self.dtype.itemsize, self.lanes)
            longest = memory // patch_bytes // ATTENTION_BLOCK * ATTENTION_BLOCK
            if not longest:
                raise ValueError(
                    f"{memory} bytes hold no lane of {ATTENTION_BLOCK} patches at {patch_bytes} bytes a patch; give "
                    f"more memory_bytes"
                )
        # Two of the largest side by side even out the lanes; a CPU has no use for it.
        least_top = _CPU_LEAST_TOP if on_cpu else max(_GPU_LEAST_TOP, 2 * largest)
        ladder = BucketLadder.default(largest, longest, least_top=least_top)
        if ladder.largest < largest:
            logger.warning(
                "memory for %d patches a lane, but an image may have %d; larger images will be refused: give more "
                "memory_bytes or lower max_image_pixels",
                ladder.largest,
                largest,
            )
        return ladder

    @classmethod
    def from_checkpoint(
        cls,
        source: str | Path | Checkpoint,
        *,
        mesh: Mesh,
        axis: str = "tp",
        config: EncoderConfig | None = None,
        progress: LoadProgress | None = None,
    ) -> "VisionEncoder":
        """From a Hugging Face or Orbax folder. Raises CheckpointError that lists every tensor that does not fit."""
        config = config or EncoderConfig()
        opened = source if isinstance(source, Checkpoint) else Checkpoint(source)
        require_auto_axis(mesh, axis)
        dtype = platform_of(mesh.devices.flat[0]).default_dtype if config.dtype is None else config.dtype
        binding = checkpoints.bind_tower(opened, dtype=dtype)
        raise_problems(opened, [binding])
        processor = checkpoints.image_processor(opened, config)
        state = load(opened, binding, mesh, axis, progress)
        return cls(binding.graphdef, state, checkpoints.vision_config(opened), processor, mesh, axis, config)

    @property
    def out_hidden_size(self) -> int:
        """O."""
        return self.vision_config.out_hidden_size

    @property
    def num_deepstack(self) -> int:
        """K."""
        return self.vision_config.num_deepstack

    @property
    def row_width(self) -> int:
        """O * (1 + K): a row is the main embedding, then one a deepstack level."""
        return self.vision_config.row_width

    @property
    def pool(self) -> jax.Array:
        """[slots, row_width], replicated. Each call donates it and makes a new one: read it anew every time."""
        return self._pool

    def programs(self) -> list[Program]:
        """One a bucket: all that runs on the devices."""
        return [self._program(capacity, np.dtype(np.uint8)) for capacity in self.ladder.capacities]

    def _program(self, capacity: int, dtype: np.dtype) -> Program:
        return bucket_program(
            self._encode,
            self._abstract_state,
            self._pool_shape,
            self.vision_config,
            self._family.num_taps,
            self.mesh,
            self._lane_axis,
            capacity,
            dtype,
        )

    def batches_requests(self) -> bool:
        """Whether the images of several requests should go into one call here (`vitbatch.gate`). Decided anew at every
        call; logged when it is first asked and when the answer changes."""
        kind = platform_of(self.mesh.devices.flat[0]).kind
        tp = self.mesh.shape[self.axis]
        decision = decide_batching(kind, dp_encoder=self.config.dp_encoder, tp=tp, batching=self.config.batching)
        if decision != self._decision:
            self._decision = decision
            how = "are encoded in one call" if decision.batched else "are encoded request by request"
            logger.info("images of several requests %s: %s", how, decision.reason)
        return decision.batched

    def warm_up(self, progress: Progress | None = None) -> WarmupReport:
        """Compiles every bucket, several at once, and then runs each on every device with full lanes. Afterwards
        nothing compiles.

        The rows are dropped: live slots of the pool keep their content. progress: called with (steps done, steps in
        all, program that made the last one); compiling and running a bucket are a step each.
        """
        begin = time.perf_counter()
        missing = [c for c in self.ladder.capacities if (c, "uint8") not in self._compiled]
        steps = len(missing) + len(self.ladder.capacities)
        done = 0

        def step(name: str) -> None:
            nonlocal done
            done += 1
            if progress:
                progress(done, steps, name)

        def keep(compilation: Compilation) -> None:
            capacity = capacity_of[compilation.program.name]
            self._compiled[capacity, "uint8"] = compilation
            step(compilation.program.name)

        # The largest first: they take longest, if any does.
        programs = {c: self._program(c, np.dtype(np.uint8)) for c in reversed(missing)}
        capacity_of = {program.name: capacity for capacity, program in programs.items()}
        compile_all(list(programs.values()), self.config.compilation_cache, keep)
        reports = []
        for capacity in self.ladder.capacities:
            ready = self._compiled[capacity, "uint8"]
            frames = self._full_lanes(capacity)
            (plan,) = plan_calls([f.grid[0] * f.grid[1] for f in frames], self.lanes, BucketLadder((capacity,)))
            start = time.perf_counter()
            jax.block_until_ready(self._dispatch(plan, frames, [None] * len(frames)))
            ran = time.perf_counter() - start
            fresh = capacity in programs
            reports.append(
                BucketReport(
                    name=ready.program.name,
                    lanes=self.lanes,
                    capacity=capacity,
                    lower_seconds=ready.lower_seconds if fresh else 0.0,
                    compile_seconds=ready.compile_seconds if fresh else 0.0,
                    run_seconds=ran,
                    source=("disk" if ready.from_disk else "compiled") if fresh else "ready",
                )
            )
            step(ready.program.name)
        return WarmupReport(tuple(reports), time.perf_counter() - begin)

    def _full_lanes(self, capacity: int) -> list[Frame]:
        """Images of pixels that are not all alike, together filling every lane."""
        merge = self.vision_config.merge_size
        pixels = np.random.default_rng(capacity).integers(
            0, 256, (_WARM_IMAGE_PATCHES, self.vision_config.patch_pixels), dtype=np.uint8
        )
        whole, rest = divmod(capacity, _WARM_IMAGE_PATCHES)
        sizes = [_WARM_IMAGE_PATCHES] * whole + [rest] * (rest > 0)
        return [Frame(pixels[:size], (merge, size // merge)) for size in sizes] * self.lanes

    def encode(self, images: Sequence[AnyImage]) -> list[Float[np.ndarray, "T W"]]:
        """Images of any requests -> float32 rows [tokens, row_width] on the host, in the order given.

        Equal images are encoded once. The pool and the cache are left alone. Raises ImageError for an image that
        cannot be used and ValueError for one above the largest bucket, before anything runs.
        """
        prepared = [self._prepared(image) for image in images]
        first_seen: dict[bytes, int] = {}
        for i, image in enumerate(prepared):
            self.check(image)
            first_seen.setdefault(image.key, i)
        unique = [prepared[i] for i in first_seen.values()]
        rows = dict(zip(first_seen, self.encode_frames([_frame(image) for image in unique]), strict=True))
        return [rows[image.key] for image in prepared]

    def encode_requests(self, requests: Sequence[Sequence[AnyImage]]) -> list[list[Float[np.ndarray, "T W"]]]:
        """`encode` for the images of several requests: in one go where `batches_requests` says so, otherwise request by
        request. Rows in the order given, one list a request; an empty one for a request of text alone."""
        if not self.batches_requests():
            return [self.encode(images) for images in requests]
        rows = iter(self.encode([image for images in requests for image in images]))
        return [[next(rows) for _ in images] for images in requests]

    def encode_frames(self, frames: Sequence[Frame]) -> list[Float[np.ndarray, "T W"]]:
        """Like `encode`, from patch rows: uint8 pixels, or floats that are normalised already."""
        per_token = self.vision_config.patches_per_token
        found: list[np.ndarray] = [np.zeros((0, self.row_width), np.float32)] * len(frames)
        for plan in self._plan([f.grid[0] * f.grid[1] for f in frames]):
            rows = self._dispatch(plan, frames, [None] * len(plan.images))
            host = np.asarray(rows).reshape(-1, self.row_width)
            for position, image in enumerate(plan.images):
                found[image] = host[plan.token_rows(position, per_token)].astype(np.float32)
        return found

    def encode_to_pool(self, prepared: Sequence[PreparedImage]) -> EncodedImages:
        """Makes sure that the rows of every image are in the pool, encoding those that are not, in as few calls as the
        patch budget allows.

        Every image is pinned once an occurrence; `release` unpins. Raises PoolFull when pinned rows leave no room and
        ValueError for an image that no bucket or no pool could ever hold; then nothing is pinned or entered.
        """
        unique: dict[bytes, PreparedImage] = {}
        for image in prepared:
            self.check(image)
            if image.num_tokens > self.cache.capacity:
                raise ValueError(
                    f"image of {image.num_tokens} tokens is larger than the pool of {self.cache.capacity}; resize it "
                    f"or raise pool_tokens"
                )
            if unique.setdefault(image.key, image).grid_thw != image.grid_thw:
                raise ValueError(f"image key {image.key.hex()[:16]} stands for two different grids in one call")
        slots, misses = self._claim(list(unique.values()))
        try:
            calls, call_of_key = self._run_calls(misses, slots)
        except BaseException:
            for image in misses:
                self.cache.release(image.key)
                self.cache.discard(image.key)
            for key in unique.keys() - {image.key for image in misses}:
                self.cache.release(key)
            raise
        keys_of_misses = [image.key for image in misses]
        # Claiming pinned each key once; the other occurrences follow now that nothing can fail.
        seen: set[bytes] = set()
        for image in prepared:
            if image.key in seen:
                self.cache.pin(image.key)
            seen.add(image.key)
        self.cache.count(len(unique) - len(misses), keys_of_misses)
        return EncodedImages(
            [slots[image.key] for image in prepared], calls, [call_of_key.get(image.key) for image in prepared]
        )

    def release(self, keys: Iterable[bytes]) -> None:
        """Unpins each key once. The rows stay cached until their slots are needed. Raises ValueError for a key that
        is not pinned."""
        for key in keys:
            self.cache.release(key)

    def check(self, image: PreparedImage) -> None:
        """Raises ValueError for an image that this encoder can never take, ImageError if the image is what is wrong
        with it. Runs nothing and may be called from any thread."""
        patches, features = image.patches.shape
        if features != self.vision_config.patch_pixels:
            raise ValueError(f"image rows have {features} features, this tower reads {self.vision_config.patch_pixels}")
        if image.num_tokens * self.vision_config.patches_per_token != patches:
            raise ValueError(f"image of {patches} patches claims {image.num_tokens} tokens")
        if patches > self.ladder.largest:
            raise ImageError(
                f"image of {image.size[1]}x{image.size[0]} px has {patches} patches; the largest bucket holds "
                f"{self.ladder.largest}: send a smaller image"
            )

    def _claim(self, images: list[PreparedImage]) -> tuple[dict[bytes, Int[np.ndarray, "T"]], list[PreparedImage]]:
        """Pins every image once, with slots for those that were absent; all or nothing."""
        slots: dict[bytes, np.ndarray] = {}
        misses: list[PreparedImage] = []
        try:
            # Hits first, so that making room for the misses cannot evict them.
            for image in images:
                held = self.cache.lookup(image.key, image.num_tokens)
                if held is None:
                    misses.append(image)
                else:
                    slots[image.key] = held
                    self.cache.pin(image.key)
            wanted = sum(image.num_tokens for image in misses)
            if wanted > self.cache.room():
                raise PoolFull(
                    f"{wanted} rows wanted, but {self.cache.tokens_pinned} of the pool's {self.cache.capacity} are in "
                    f"use or asked for; release images, send fewer at once or raise pool_tokens"
                )
        except BaseException:
            self.release(slots)
            raise
        for image in misses:
            slots[image.key] = self.cache.insert(image.key, image.num_tokens)
            self.cache.pin(image.key)
        return slots, misses

    def _run_calls(
        self, misses: list[PreparedImage], slots: dict[bytes, Int[np.ndarray, "T"]]
    ) -> tuple[list[CallStats], dict[bytes, int]]:
        frames = [_frame(image) for image in misses]
        plans = self._plan([image.patches.shape[0] for image in misses])
        started, running = time.perf_counter(), []
        for plan in plans:
            running.append(self._dispatch(plan, frames, [slots[misses[i].key] for i in plan.images]))
        calls, call_of_key = [], {}
        for index, (plan, rows) in enumerate(zip(plans, running, strict=True)):
            # All calls are dispatched before the first is waited for, so the host lays out one while another runs.
            jax.block_until_ready(rows)
            ended = time.perf_counter()
            self._calls += 1
            calls.append(
                CallStats(
                    call_id=self._calls,
                    images=len(plan.images),
                    lanes=plan.lanes,
                    lanes_filled=plan.lanes_filled,
                    bucket=plan.capacity,
                    patches=plan.patches,
                    padded_ratio=plan.padded_ratio,
                    imbalance=plan.imbalance,
                    seconds=ended - started,
                )
            )
            started = ended
            call_of_key.update((misses[i].key, index) for i in plan.images)
        return calls, call_of_key

    def _plan(self, sizes: list[int]) -> list[CallPlan]:
        return plan_calls(
            sizes, self.lanes, self.ladder, self.config.max_call_patches, self._quadratic, self._lane_patches
        )

    def _prepared(self, image: AnyImage) -> PreparedImage:
        return image if isinstance(image, PreparedImage) else self.processor.prepare(image)

    def _compile(self, capacity: int, dtype: np.dtype) -> Compilation:
        key = (capacity, dtype.name)
        if key not in self._compiled:
            compile_all(
                [self._program(capacity, dtype)],
                self.config.compilation_cache,
                lambda compilation: self._compiled.update({key: compilation}),
            )
        return self._compiled[key]

    def _dispatch(self, plan: CallPlan, frames: Sequence[Frame], slots: Sequence[np.ndarray | None]) -> jax.Array:
        """Runs one call. slots: where each image's rows go in the pool, None to drop them. Returns rows
        [L, C / 4, W], not waited for."""
        per_token = self.vision_config.patches_per_token
        dtype, features = frames[plan.images[0]].rows.dtype, frames[plan.images[0]].rows.shape[1]
        patches = np.zeros((plan.lanes, plan.capacity, features), dtype)
        # Every row that is not wanted gets a slot of its own past the pool: dropped, and still unique.
        dest = np.arange(plan.lanes * plan.capacity // per_token, dtype=np.int32) + np.int32(self.cache.capacity)
        for position, image in enumerate(plan.images):
            start = plan.start[position]
            patches[plan.lane[position], start : start + plan.sizes[position]] = frames[image].rows
            if (wanted := slots[position]) is not None:
                dest[plan.token_rows(position, per_token)] = wanted
        lanes = lay_out(
            plan,
            [frame.grid for frame in frames],
            self.vision_config.merge_size,
            self._family.num_taps,
            self._taps,
            self.vision_config.window_cells,
        )
        ready = self._compile(plan.capacity, dtype)
        # The very shardings the program was compiled with, in warm-up and at run time alike.
        arguments = jax.device_put((patches, lanes, dest), ready.compiled.input_shardings[0][2:])
        self._pool, rows = run_compiled(
            ready.program.name, ready.compiled, ready.program.args, _ARGUMENTS, self._state, self._pool, *arguments
        )
        return rows


def _frame(image: PreparedImage) -> Frame:
    return Frame(image.patches, image.grid_thw[1:])


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Made on the devices: a pool can be gigabytes."""
    return jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)()
