"""Configuration of the vision library: the tower's geometry, the bucket ladder, the encoder's limits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

BATCHING = ("auto", "always", "never")

ATTENTION_BLOCK = 64
"""Patches an attention block; every image starts at a multiple of it in its lane, and every capacity is one."""

TINY_BLOCK = 4
"""Patches a block of a tiny lane, which holds images of at most ATTENTION_BLOCK patches: one of 6x6 takes 36 rows there
and not 64."""

TINY_ROOM = 16
"""Patches of a tiny lane that an image takes at least, so that a lane has few of them."""

# Smaller lanes take as long: a launch of few rows does not fill a device.
_SMALLEST_CAPACITY = 256

# Of tiny lanes: one for a request's few images, one for those of many.
_TINY_CAPACITIES = (256, 1024)

# And one for what a run of many leaves over: with it a quarter less of tiny lanes is padding.
_TINY_REST = 384

MAX_BUCKETS = 14
"""Programs that a chosen ladder has at most: each costs a compile at every start."""


def align(patches: int, block: int = ATTENTION_BLOCK) -> int:
    """`patches` rounded up to whole blocks."""
    return -(-patches // block) * block


def room(patches: int, block: int = ATTENTION_BLOCK) -> int:
    """Patches of a lane in blocks of `block` that an image takes."""
    return max(align(patches, block), TINY_ROOM)


@dataclass(frozen=True)
class VisionConfig:
    """What every tower has. A family adds its own fields in its file under `towers/`.

    hidden_size: width of the tower. out_hidden_size (O): width of the language model's embeddings.
    patch_size: side of a patch in pixels. temporal_patch_size: frames a patch spans; an image is that many copies.
    merge_size: merge_size x merge_size patches become one token.
    rope_theta: base of the rotary angles.
    deepstack_indexes: blocks after which a deepstack merger reads the hidden states; K of them.
    """

    model_type: str
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    in_channels: int
    rope_theta: float
    deepstack_indexes: tuple[int, ...]

    def __post_init__(self):
        for name in ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size"):
            _require_positive(name, getattr(self, name))
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            _require_positive(name, getattr(self, name))
        if self.in_channels != 3:
            raise ValueError(f"vision_config: in_channels is {self.in_channels}; only RGB (3) is supported")
        if ATTENTION_BLOCK % self.merge_size**2:
            raise ValueError(
                f"vision_config: spatial_merge_size {self.merge_size} makes tokens of {self.merge_size**2} patches, "
                f"which do not fill attention blocks of {ATTENTION_BLOCK} evenly; 1, 2, 4 and 8 do"
            )
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ValueError(
                f"vision_config: hidden_size {self.hidden_size} over {self.num_heads} heads must give a head size "
                f"that is a multiple of 4 (two axes of rotary pairs)"
            )
        if any(not 0 <= i < self.depth for i in self.deepstack_indexes):
            raise ValueError(
                f"vision_config: deepstack indexes {list(self.deepstack_indexes)} must lie in [0, {self.depth})"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_deepstack(self) -> int:
        """K."""
        return len(self.deepstack_indexes)

    @property
    def row_width(self) -> int:
        """Features of one token's row: the main embedding, then one a deepstack level. O * (1 + K)."""
        return self.out_hidden_size * (1 + self.num_deepstack)

    @property
    def window_cells(self) -> int:
        """Side of an attention window in merged cells; 0 for a tower whose patches all see their whole image."""
        return 0

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def patch_pixels(self) -> int:
        """Features of one frame's patch: channels * P * P."""
        return self.in_channels * self.patch_size**2

    @property
    def patch_features(self) -> int:
        """Features of a patch row as the tower reads it: channels * T * P * P."""
        return self.patch_pixels * self.temporal_patch_size


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")


def require_batching(batching: str) -> None:
    """Raises ValueError for anything but the three settings of `EncoderConfig.batching`."""
    if batching not in BATCHING:
        raise ValueError(f"batching is {batching!r}; it must be one of {', '.join(BATCHING)}")


def read_field(values: Mapping[str, Any], name: str, where: str = "vision_config") -> Any:
    """values[name]; raises ValueError that names the absent field and where it was looked for."""
    if name not in values:
        raise ValueError(f"config.json: {where} lacks {name!r}")
    return values[name]


def read_count(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of vision_config; raises ValueError when it is absent without a default, or is none."""
    value = read_field(values, name) if default is None else values.get(name, default)
    _require_positive(f"config.json: vision_config {name}", value)
    return value


def read_positive(values: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number above 0 of vision_config, or the default when it is absent; raises ValueError otherwise."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: vision_config {name} is {value!r}; it must be a positive number")
    return float(value)


def read_flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """A truth value of vision_config, or the default when it is absent; raises ValueError for anything else."""
    if not isinstance(value := values.get(name, default), bool):
        raise ValueError(f"config.json: vision_config {name} is {value!r}; it must be true or false")
    return value


def read_indexes(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of block numbers of vision_config, in the file's order; raises ValueError when it is absent or is none."""
    found = read_field(values, name)
    if not isinstance(found, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in found):
        raise ValueError(f"config.json: vision_config {name} is {found!r}; it must be a list of block numbers")
    return tuple(found)


def read_geometry(hf_config: Mapping[str, Any], *, activation: str) -> dict[str, Any]:
    """What every family states in the same words, as fields of VisionConfig without deepstack. activation: the
    hidden_act that the family's tower computes. Raises ValueError that names what is absent or unsupported."""
    vision = read_field(hf_config, "vision_config", "the top level")
    if not isinstance(vision, Mapping):
        raise ValueError(f"config.json: vision_config is a {type(vision).__name__}, not an object")
    if (stated := vision.get("hidden_act", activation)) != activation:
        raise ValueError(f"vision_config: hidden_act {stated!r} is not supported, only {activation!r}")
    rope = vision.get("rope_parameters") or {}
    return {
        "model_type": read_field(hf_config, "model_type", "the top level"),
        "depth": read_count(vision, "depth"),
        "hidden_size": read_count(vision, "hidden_size"),
        "num_heads": read_count(vision, "num_heads"),
        "intermediate_size": read_count(vision, "intermediate_size"),
        "out_hidden_size": read_count(vision, "out_hidden_size"),
        "patch_size": read_count(vision, "patch_size"),
        "temporal_patch_size": read_count(vision, "temporal_patch_size", 2),
        "merge_size": read_count(vision, "spatial_merge_size", 2),
        "in_channels": read_count(vision, "in_channels", 3),
        "rope_theta": read_positive(rope, "rope_theta", 10000.0),
        "deepstack_indexes": (),
    }


def activation_bytes(vision: VisionConfig, itemsize: int, lanes: int) -> int:
    """An upper bound on the bytes a patch takes on a device while a call runs: its pixels, the widest layers side by
    side (a gated MLP in float32 before its cast, queries to values, the residual) and its share of every lane's rows.
    itemsize: of the parameters' dtype."""
    pixels = vision.patch_features * (5 + itemsize)
    hidden = vision.hidden_size * (24 + 8 * itemsize) + vision.intermediate_size * 2 * (4 + itemsize)
    rows = vision.row_width * itemsize * (2 + lanes) // vision.patches_per_token
    return pixels + hidden + rows


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a lane: its capacity in patches, and the patches of its attention blocks."""

    capacity: int
    block: int = ATTENTION_BLOCK

    @property
    def longest(self) -> int:
        """Patches of the largest image it may hold."""
        return self.capacity if self.block == ATTENTION_BLOCK else min(self.capacity, ATTENTION_BLOCK)

    @property
    def blocks(self) -> int:
        return self.capacity // self.block

    def __str__(self) -> str:
        return f"{self.capacity}" if self.block == ATTENTION_BLOCK else f"tiny/{self.capacity}"


@dataclass(frozen=True)
class BucketLadder:
    """The lane capacities (patches a lane) that programs exist for.

    capacities: ascending, each a multiple of 64. tiny: capacities of lanes that only hold images of at most 64 patches,
    which start at multiples of 4 there; none by default.
    """

    capacities: tuple[int, ...]
    tiny: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.capacities:
            raise ValueError("a ladder needs at least one capacity")
        for capacities in (self.capacities, self.tiny):
            for capacity in capacities:
                _require_positive("ladder capacity", capacity)
                if capacity % ATTENTION_BLOCK:
                    raise ValueError(f"ladder capacity {capacity} is not a multiple of {ATTENTION_BLOCK} patches")
            if any(a >= b for a, b in pairwise(capacities)):
                raise ValueError(f"ladder capacities {list(capacities)} must ascend without repeats")

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """One a program, the tiny ones first."""
        return (*(Bucket(c, TINY_BLOCK) for c in self.tiny), *map(Bucket, self.capacities))

    @classmethod
    def default(
        cls,
        largest_image_patches: int,
        max_capacity: int | None = None,
        *,
        least_top: int = 1024,
        smallest_image_patches: int = ATTENTION_BLOCK,
    ) -> "BucketLadder":
        """Powers of two from 256 up to the largest image, and at least to `least_top`, so that small images share a
        lane; then the widest step is halved until none is wider than an eighth of the whole (or 128), or there are
        14.

        max_capacity: the lane that memory allows; the ladder ends there, and images above it are refused.
        smallest_image_patches: where images under 64 patches may come, two of the 14 are for lanes of them alone, and
        a third where one of the 14 is left.
        """
        _require_positive("largest_image_patches", largest_image_patches)
        _require_positive("least_top", least_top)
        top = max(align(least_top), align(largest_image_patches))
        if max_capacity is not None:
            _require_positive("max_capacity", max_capacity)
            if max_capacity % ATTENTION_BLOCK:
                raise ValueError(f"max_capacity {max_capacity} is not a multiple of {ATTENTION_BLOCK} patches")
            top = min(top, max_capacity)
        capacities = []
        while _SMALLEST_CAPACITY << len(capacities) < top:
            capacities.append(_SMALLEST_CAPACITY << len(capacities))
        tiny = tuple(c for c in _TINY_CAPACITIES if c <= top) if smallest_image_patches < ATTENTION_BLOCK else ()
        capacities = [*capacities, top][-(MAX_BUCKETS - len(tiny)) :]
        while len(capacities) + len(tiny) < MAX_BUCKETS:
            # Lanes are dealt to within a percent of each other: what they pad is the step to the next capacity.
            low, high = max(pairwise(capacities), key=lambda step: step[1] - step[0], default=(top, top))
            if high - low <= max(top // 8, _SMALLEST_CAPACITY // 2):
                break
            capacities = sorted([*capacities, align((low + high) // 2)])
        if len(tiny) == len(_TINY_CAPACITIES) and len(capacities) + len(tiny) < MAX_BUCKETS:
            tiny = tuple(sorted((*tiny, _TINY_REST)))
        return cls(tuple(capacities), tiny)

    @property
    def largest(self) -> int:
        return self.capacities[-1]

    def bucket_for(self, patches: int) -> int:
        """The smallest capacity that holds `patches`. Raises ValueError above the largest: nothing compiles for it."""
        for capacity in self.capacities:
            if patches <= capacity:
                return capacity
        raise ValueError(
            f"{patches} patches exceed the largest bucket of {self.largest} patches; resize the image or start with "
            f"a larger ladder"
        )


_IMAGE_BOUNDS = ("min_pixels", "max_image_pixels", "min_image_tokens", "max_image_tokens")


@dataclass(frozen=True)
class EncoderConfig:
    """How an encoder runs.

    ladder: None chooses one from the processor's largest image and the memory.
    memory_bytes: memory of one device that a call may take beside weights and pool; bounds a chosen ladder. None is
        15 % of what is free on a GPU when the encoder is made, and no bound on a CPU.
    dtype: of parameters and activations; None is the platform's default (bfloat16 on a GPU, float32 on a CPU).
    pool_tokens, pool_bytes: size of the device row pool, which is the embedding cache, in rows or in bytes a device;
        at most one of them. None is room for 4 of the largest image, at least 1024 rows.
    dp_encoder: deal images over the mesh axis; otherwise every device encodes every image.
    batching: whether the images of several requests share a call: "auto" by platform (see `vitbatch.gate`), "always"
        or "never".
    quadratic_lanes: deal images by what attention makes them cost, not by patches alone.
    max_call_patches: patch budget of one call over all lanes; None is what the largest bucket holds. One image above it
        still runs, alone. On a CPU lanes hold 2048 patches where no image needs more: larger calls leave its caches.
    compilation_cache: folder that warm-up reads compiled programs from and writes them to; None leaves JAX's own
        setting alone.
    max_pixels: an image with more pixels than this is refused from its header, before it is decoded.
    min_pixels, max_image_pixels: override the preprocessor's bounds on the resized image, in the units of its file.
    min_image_tokens, max_image_tokens: the same in tokens; each side in one unit.
    """

    ladder: BucketLadder | None = None
    dtype: Any = None
    memory_bytes: int | None = None
    pool_tokens: int | None = None
    pool_bytes: int | None = None
    dp_encoder: bool = True
    batching: str = "auto"
    quadratic_lanes: bool = False
    max_call_patches: int | None = None
    compilation_cache: str | Path | None = None
    max_pixels: int = 64_000_000
    min_pixels: int | None = None
    max_image_pixels: int | None = None
    min_image_tokens: int | None = None
    max_image_tokens: int | None = None

    def __post_init__(self):
        _require_positive("max_pixels", self.max_pixels)
        for name in ("memory_bytes", "pool_tokens", "pool_bytes", "max_call_patches", *_IMAGE_BOUNDS):
            if (value := getattr(self, name)) is not None:
                _require_positive(name, value)
        if self.pool_tokens is not None and self.pool_bytes is not None:
            raise ValueError("pool_tokens and pool_bytes are both set; give one of them")
        require_batching(self.batching)
        if self.min_pixels and self.max_image_pixels and self.min_pixels > self.max_image_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is over max_image_pixels {self.max_image_pixels}")
        if self.min_image_tokens and self.max_image_tokens and self.min_image_tokens > self.max_image_tokens:
            raise ValueError(
                f"min_image_tokens {self.min_image_tokens} is over max_image_tokens {self.max_image_tokens}"
            )
