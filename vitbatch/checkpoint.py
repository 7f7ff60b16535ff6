"""Binds a vision tower and its image processor to a checkpoint folder."""

import json
from typing import Any

from vitbatch.config import EncoderConfig, VisionConfig
from vitbatch.images import ImageProcessor, read_processor
from vitbatch.towers import family_of
from vitstripe.checkpoint import WRONG_KIND, Binding, Checkpoint, CheckpointError, bind
from vitstripe.platform import default_platform

_PREFIXES = ("model.visual.", "visual.")


def vision_config(checkpoint: Checkpoint) -> VisionConfig:
    """The tower's geometry. Raises CheckpointError for an unsupported family or a broken config.json."""
    try:
        model_type = checkpoint.config.get("model_type", "")
        return family_of(model_type).read_config(checkpoint.config)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from error
    except WRONG_KIND as error:
        raise CheckpointError(
            f"{checkpoint.folder}: config.json: a field of vision_config has a value of the wrong kind: {error}"
        ) from error


def image_processor(checkpoint: Checkpoint, config: EncoderConfig | None = None) -> ImageProcessor:
    """The processor that preprocessor_config.json (or processor_config.json) describes, within `config`'s limits.
    With a ladder in `config`, images above its largest bucket are refused before they are decoded."""
    config = config or EncoderConfig()
    vision = vision_config(checkpoint)
    try:
        return read_processor(
            _processor_settings(checkpoint),
            patch_size=vision.patch_size,
            merge_size=vision.merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            model_type=vision.model_type,
            min_pixels=config.min_pixels,
            max_pixels=config.max_image_pixels,
            min_image_tokens=config.min_image_tokens,
            max_image_tokens=config.max_image_tokens,
            max_decoded_pixels=config.max_pixels,
            max_patches=config.ladder.largest if config.ladder else None,
        )
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from error


def _processor_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    for name, inner in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        file = checkpoint.folder / name
        if not file.is_file():
            continue
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} is not readable JSON: {error}") from error
        settings = settings.get(inner) if inner and isinstance(settings, dict) else settings
        if isinstance(settings, dict):
            return settings
    raise CheckpointError(f"{checkpoint.folder} holds no preprocessor_config.json, so images cannot be prepared")


def bind_tower(checkpoint: Checkpoint, *, dtype: Any = None) -> Binding:
    """The tower bound to the folder's `visual.` tensors, nothing read yet; its item in an Orbax folder is "vision".

    dtype: of the parameters; None is the default platform's (bfloat16 on a GPU, float32 on a CPU).
    """
    config = vision_config(checkpoint)
    dtype = default_platform().default_dtype if dtype is None else dtype
    return bind(
        checkpoint,
        lambda: family_of(config.model_type).build(config, dtype),
        name="vision",
        disk_names=lambda path: tuple(prefix + path for prefix in _PREFIXES),
        owns=lambda tensor: "visual." in tensor,
    )
