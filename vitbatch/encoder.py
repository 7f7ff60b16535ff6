"""VisionEncoder: the images of many requests in one call, with one program a bucket and a row pool on the device."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
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
from vitbatch.bursts import plan_bursts
from vitbatch.cache import EmbeddingCache, PoolFull
from vitbatch.calls import CallStats, EncodedImages, Frame
from vitbatch.compile_guard import run_compiled
from vitbatch.config import TINY_BLOCK, Bucket, EncoderConfig, VisionConfig
from vitbatch.gate import BatchDecision, decide_batching
from vitbatch.images import ImageError, ImageProcessor, PreparedImage
from vitbatch.planning import CallPlan, attention_cost, lay_out, plan_call, plan_calls
from vitbatch.program import bucket_program, build_encode
from vitbatch.sizing import choose_ladder, good_lane, pool_tokens
from vitbatch.towers import family_of
from vitbatch.warmup import BucketReport, Compilation, Progress, WarmupReport, compile_all
from vitbatch.workers import Workers
from vitstripe import Program, require_auto_axis
from vitstripe.checkpoint import Checkpoint, load, raise_problems
from vitstripe.checkpoint import Progress as LoadProgress
from vitstripe.platform import platform_of, platform_of_mesh
from vitstripe.program import zeros_of
from vitstripe.selftest import bounded

logger = logging.getLogger("vitbatch.encoder")

# Not one image a bucket: attention over 65536 patches would take seconds a launch and prove nothing more.
_WARM_IMAGE_PATCHES = 1024

# Grids whose position taps are kept; servers see the same few sizes again and again.
_KEPT_GRIDS = 64

# Calls dispatched before the first is waited for. Each holds its patches and rows on the device.
_IN_FLIGHT = 3

_ARGUMENTS = ("state", "pool", "patches", "lanes", "dest")

AnyImage = Image.Image | bytes | np.ndarray | PreparedImage


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
        device = mesh.devices.flat[0]
        platform = platform_of(device)
        self.dtype = jnp.dtype(platform.default_dtype if config.dtype is None else config.dtype)
        self.ladder = config.ladder or choose_ladder(vision_config, processor, config, self.dtype, self.lanes, device)
        if self.ladder.tiny and TINY_BLOCK % vision_config.patches_per_token:
            raise ValueError(
                f"tiny lanes hold blocks of {TINY_BLOCK} patches, which is no whole number of this tower's tokens of "
                f"{vision_config.patches_per_token}; give a ladder without them"
            )
        # Flat, since a call takes a third of a millisecond to flatten what it is given otherwise.
        self._weights = tuple(jax.tree.leaves(state))
        self._burst = self.lanes * good_lane(device)
        self._lane_patches = good_lane(device) if platform.kind == "cpu" else None
        self._quadratic = attention_cost(vision_config) if config.quadratic_lanes else 0.0
        self._taps = lru_cache(_KEPT_GRIDS)(lambda gh, gw: self._family.position_taps(vision_config, gh, gw))
        self._decision: BatchDecision | None = None
        self._encode = build_encode(
            graphdef, state, vision_config, processor.mean, processor.std, mesh, self._lane_axis, platform
        )
        largest = min(self.ladder.largest, processor.largest_image_patches) // vision_config.patches_per_token
        row_bytes = self.row_width * self.dtype.itemsize
        self.cache = EmbeddingCache(pool_tokens(config, largest, row_bytes), row_bytes)
        self._pool_shape = jax.ShapeDtypeStruct(
            (self.cache.capacity, self.row_width), self.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        )
        self._pool = zeros_of(self._pool_shape)
        self._compiled: dict[tuple[Bucket, str], Compilation] = {}
        self._calls = 0
        self._workers = Workers()  # no thread before there is work

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
        dtype = platform_of_mesh(mesh).default_dtype if config.dtype is None else config.dtype
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
        return [self._program(bucket, np.dtype(np.uint8)) for bucket in self.ladder.buckets]

    def _program(self, bucket: Bucket, dtype: np.dtype) -> Program:
        return bucket_program(
            self._encode,
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in self._weights),
            self._pool_shape,
            self.vision_config,
            self._family.num_taps,
            self.mesh,
            self._lane_axis,
            bucket,
            dtype,
        )

    def batches_requests(self) -> bool:
        """Whether the images of several requests should go into one call here (`vitbatch.gate`). Decided anew at every
        call; logged when it is first asked and when the answer changes."""
        kind = platform_of_mesh(self.mesh).kind
        tp = self.mesh.shape[self.axis]
        decision = decide_batching(kind, dp_encoder=self.config.dp_encoder, tp=tp, batching=self.config.batching)
        if decision != self._decision:
            self._decision = decision
            how = "are encoded in one call" if decision.batched else "are encoded request by request"
            logger.info("images of several requests %s: %s", how, decision.reason)
        return decision.batched

    def warm_up(self, progress: Progress | None = None, *, seconds: float | None = None) -> WarmupReport:
        """Compiles every bucket, several at once, and then runs each on every device with full lanes. Afterwards
        nothing compiles.

        The rows are dropped: live slots of the pool keep their content. progress: called with (steps done, steps in
        all, program that made the last one); compiling and running a bucket are a step each. seconds: for each run;
        None for no limit. Raises CollectiveHang naming the program whose run takes longer; the encoder is of no use
        then.
        """
        begin = time.perf_counter()
        buckets = self.ladder.buckets
        missing = [b for b in buckets if (b, "uint8") not in self._compiled]
        steps = len(missing) + len(buckets)
        done = 0

        def step(name: str) -> None:
            nonlocal done
            done += 1
            if progress:
                progress(done, steps, name)

        def keep(compilation: Compilation) -> None:
            self._compiled[bucket_of[compilation.program.name], "uint8"] = compilation
            step(compilation.program.name)

        # The largest first: they take longest, if any does.
        programs = {b: self._program(b, np.dtype(np.uint8)) for b in reversed(missing)}
        bucket_of = {program.name: bucket for bucket, program in programs.items()}
        compile_all(list(programs.values()), self.config.compilation_cache, keep)
        reports = []
        for bucket in buckets:
            ready = self._compiled[bucket, "uint8"]
            frames = self._full_lanes(bucket)
            plan = plan_call([f.grid[0] * f.grid[1] for f in frames], self.lanes, bucket)
            start = time.perf_counter()
            run = partial(self._warm_run, plan, frames)
            run() if seconds is None else bounded(run, seconds, f"the first run of {ready.program.name}")
            ran = time.perf_counter() - start
            fresh = bucket in programs
            reports.append(
                BucketReport(
                    name=ready.program.name,
                    lanes=self.lanes,
                    capacity=bucket.capacity,
                    lower_seconds=ready.lower_seconds if fresh else 0.0,
                    compile_seconds=ready.compile_seconds if fresh else 0.0,
                    run_seconds=ran,
                    source=("disk" if ready.from_disk else "compiled") if fresh else "ready",
                )
            )
            step(ready.program.name)
        return WarmupReport(tuple(reports), time.perf_counter() - begin)

    def _warm_run(self, plan: CallPlan, frames: list[Frame]) -> None:
        jax.block_until_ready(self._dispatch(plan, frames, [None] * len(frames)))

    def _full_lanes(self, bucket: Bucket) -> list[Frame]:
        """Images of pixels that are not all alike, together filling every lane."""
        merge, most = self.vision_config.merge_size, min(bucket.longest, _WARM_IMAGE_PATCHES)
        pixels = np.random.default_rng(bucket.capacity).integers(
            0, 256, (most, self.vision_config.patch_pixels), dtype=np.uint8
        )
        whole, rest = divmod(bucket.capacity, most)
        sizes = [most] * whole + [rest] * (rest > 0)
        return [Frame(pixels[:size], (merge, size // merge)) for size in sizes] * self.lanes

    def encode(self, images: Sequence[AnyImage]) -> list[Float[np.ndarray, "T W"]]:
        """Images of any requests -> float32 rows [tokens, row_width] on the host, in the order given.

        Equal images are encoded once. Images that are not prepared yet are, by a thread a core on one after the other,
        while the devices encode those before them. The pool and the cache are left alone. Raises ImageError for an
        image that cannot be used and ValueError for one above the largest bucket.
        """
        keys: list[bytes] = []
        place: dict[bytes, int] = {}

        def unique() -> Iterator[Frame]:
            for image in self._prepared(images):
                self.check(image)
                keys.append(image.key)
                if image.key not in place:
                    place[image.key] = len(place)
                    yield _frame(image)

        rows = list(self._rows(self._bursts(unique())))
        return [rows[place[key]] for key in keys]

    def encode_requests(self, requests: Sequence[Sequence[AnyImage]]) -> list[list[Float[np.ndarray, "T W"]]]:
        """`encode` for the images of several requests: in one go where `batches_requests` says so, otherwise request by
        request. Rows in the order given, one list a request; an empty one for a request of text alone."""
        if not self.batches_requests():
            return [self.encode(images) for images in requests]
        rows = iter(self.encode([image for images in requests for image in images]))
        return [[next(rows) for _ in images] for images in requests]

    def encode_frames(self, frames: Sequence[Frame]) -> list[Float[np.ndarray, "T W"]]:
        """Like `encode`, from patch rows: uint8 pixels, or floats that are normalised already."""
        return list(self._rows((plan, frames) for plan in self._plan([f.grid[0] * f.grid[1] for f in frames])))

    def _bursts(self, frames: Iterable[Frame]) -> Iterator[tuple[CallPlan, Sequence[Frame]]]:
        return plan_bursts(frames, self._plan, self._burst)

    def _rows(self, calls: Iterable[tuple[CallPlan, Sequence[Frame]]]) -> Iterator[Float[np.ndarray, "T W"]]:
        """Runs calls and gives the float32 rows of their images, in order. While one runs, the next is laid out and
        the rows of the one before are taken."""
        running: deque[tuple[CallPlan, jax.Array]] = deque()
        for plan, frames in calls:
            rows = self._dispatch(plan, frames, [None] * len(plan.images))
            # Not on its way to the host yet: on a GPU a copy that waits for its call holds up the launches behind it.
            running.append((plan, rows))
            if len(running) == _IN_FLIGHT:
                yield from self._host_rows(*running.popleft())
        while running:
            yield from self._host_rows(*running.popleft())

    def _host_rows(self, plan: CallPlan, rows: jax.Array) -> Iterator[Float[np.ndarray, "T W"]]:
        host = np.asarray(rows).reshape(-1, self.row_width)
        for position in range(len(plan.images)):
            yield _as_float32(host[plan.token_rows(position, self.vision_config.patches_per_token)])

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

    @partial(jax.profiler.annotate_function, name="plan")
    def _plan(self, sizes: list[int]) -> list[CallPlan]:
        return plan_calls(
            sizes, self.lanes, self.ladder, self.config.max_call_patches, self._quadratic, self._lane_patches
        )

    def _prepared(self, images: Sequence[AnyImage]) -> Iterator[PreparedImage]:
        """In order, made by threads that work ahead, together on the first that is not ready."""
        raw = [image for image in images if not isinstance(image, PreparedImage)]
        made = self._workers.each(partial(self.processor.prepare, spread=self._workers.spread), raw)
        for image in images:
            yield image if isinstance(image, PreparedImage) else next(made).result()

    def _compile(self, bucket: Bucket, dtype: np.dtype) -> Compilation:
        key = (bucket, dtype.name)
        if key not in self._compiled:
            compile_all(
                [self._program(bucket, dtype)],
                self.config.compilation_cache,
                lambda compilation: self._compiled.update({key: compilation}),
            )
        return self._compiled[key]

    def _dispatch(self, plan: CallPlan, frames: Sequence[Frame], slots: Sequence[np.ndarray | None]) -> jax.Array:
        """Runs one call. slots: where each image's rows go in the pool, None to drop them. Returns rows
        [L, C / 4, W], not waited for."""
        ready, arguments = self._arguments(plan, frames, slots)
        return self._run(ready, arguments)

    def _arguments(
        self, plan: CallPlan, frames: Sequence[Frame], slots: Sequence[np.ndarray | None]
    ) -> tuple[Compilation, tuple[Any, ...]]:
        """The program of a call, and what it takes besides weights and pool, on the devices."""
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
        ready = self._compile(plan.bucket, dtype)
        # The very shardings the program was compiled with, in warm-up and at run time alike.
        return ready, jax.device_put((patches, lanes, dest), ready.compiled.input_shardings[0][2:])

    def _run(self, ready: Compilation, arguments: tuple[Any, ...]) -> jax.Array:
        self._pool, rows = run_compiled(
            ready.program.name, ready.compiled, ready.program.args, _ARGUMENTS, self._weights, self._pool, *arguments
        )
        return rows


def _frame(image: PreparedImage) -> Frame:
    return Frame(image.patches, image.grid_thw[1:])


def _as_float32(rows: np.ndarray) -> Float[np.ndarray, "T W"]:
    """A bfloat16 is the upper half of its float32; numpy's own cast takes twice as long."""
    if rows.dtype != jnp.bfloat16:
        return rows.astype(np.float32)
    halves = np.zeros((*rows.shape, 2), np.uint16)
    halves[..., 1] = rows.view(np.uint16)
    return halves.view(np.float32)[..., 0]
