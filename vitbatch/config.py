"""Configuration of the vision library: the tower's geometry, the bucket ladder, the encoder's limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ATTENTION_BLOCK = 64
"""Patches an attention block; every image starts at a multiple of it in its lane, and every capacity is one."""

_SMALLEST_CAPACITY = 256
_LEAST_TOP_CAPACITY = 1024


def align(patches: int) -> int:
    """`patches` rounded up to whole attention blocks: the room an image takes in a lane."""
    return -(-patches // ATTENTION_BLOCK) * ATTENTION_BLOCK


@dataclass(frozen=True)
class VisionConfig:
    """What every tower has. A family adds its own fields in its file under `towers/`.

    hidden_size: width of the tower. out_hidden_size (O): width of the language model's embeddings.
    patch_size: side of a patch in pixels. temporal_patch_size: frames a patch spans; an image is that many copies.
    merge_size: merge_size x merge_size patches become one token.
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
    deepstack_indexes: tuple[int, ...]

    def __post_init__(self):
        for name in ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size"):
            _require_positive(name, getattr(self, name))
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            _require_positive(name, getattr(self, name))
        if self.in_channels != 3:
            raise ValueError(f"vision_config: in_channels is {self.in_channels}; only RGB (3) is supported")
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


@dataclass(frozen=True)
class BucketLadder:
    """The lane capacities (patches a lane) that programs exist for.

    capacities: ascending, each a multiple of 64.
    """

    capacities: tuple[int, ...]

    def __post_init__(self):
        if not self.capacities:
            raise ValueError("a ladder needs at least one capacity")
        for capacity in self.capacities:
            _require_positive("ladder capacity", capacity)
            if capacity % ATTENTION_BLOCK:
                raise ValueError(f"ladder capacity {capacity} is not a multiple of {ATTENTION_BLOCK} patches")
        if any(a >= b for a, b in zip(self.capacities, self.capacities[1:], strict=False)):
            raise ValueError(f"ladder capacities {list(self.capacities)} must ascend without repeats")

    @classmethod
    def default(cls, largest_image_patches: int, max_capacity: int | None = None) -> "BucketLadder":
        """Powers of two from 256 to the one that holds the largest image (at least 1024, so that small images share
        a lane). `max_capacity` ends the ladder early; images above it are then refused."""
        _require_positive("largest_image_patches", largest_image_patches)
        top = max(_LEAST_TOP_CAPACITY, align(largest_image_patches))
        capacities = [_SMALLEST_CAPACITY]
        while capacities[-1] < top:
            capacities.append(2 * capacities[-1])
        if max_capacity is not None:
            _require_positive("max_capacity", max_capacity)
            if max_capacity % ATTENTION_BLOCK:
                raise ValueError(f"max_capacity {max_capacity} is not a multiple of {ATTENTION_BLOCK} patches")
            if capacities[-1] > max_capacity:
                capacities = [c for c in capacities if c < max_capacity] + [max_capacity]
        return cls(tuple(capacities))

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


@dataclass(frozen=True)
class EncoderConfig:
    """How an encoder runs.

    ladder: None chooses one that holds the processor's largest image.
    dtype: of parameters and activations; None is the platform's default (bfloat16 on a GPU, float32 on a CPU).
    pool_tokens: rows of the device row pool; None is room for 4 of the largest image, at least 1024.
    dp_encoder: deal images over the mesh axis; otherwise every device encodes every image.
    max_call_patches: patch budget of one call over all lanes; None is what the largest bucket holds. One image above
        it still runs, alone.
    max_pixels: an image with more pixels than this is refused from its header, before it is decoded.
    min_pixels, max_image_pixels: override the preprocessor's bounds on the resized image.
    """

    ladder: BucketLadder | None = None
    dtype: Any = None
    pool_tokens: int | None = None
    dp_encoder: bool = True
    max_call_patches: int | None = None
    max_pixels: int = 64_000_000
    min_pixels: int | None = None
    max_image_pixels: int | None = None

    def __post_init__(self):
        _require_positive("max_pixels", self.max_pixels)
        for name in ("pool_tokens", "max_call_patches", "min_pixels", "max_image_pixels"):
            if (value := getattr(self, name)) is not None:
                _require_positive(name, value)
        if self.min_pixels and self.max_image_pixels and self.min_pixels > self.max_image_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is over max_image_pixels {self.max_image_pixels}")
