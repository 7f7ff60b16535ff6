"""preprocessor_config.json to an ImageProcessor: which family's rule, and its settings."""

import math
from collections.abc import Mapping
from typing import Any

from PIL import Image

from vitbatch.images import glm4v, glm5_next, qwen
from vitbatch.images.processor import ImageProcessor
from vitbatch.images.rules import CLIP_MEAN, CLIP_STD, ResizeRule

# By `image_processor_type` without "Fast" or "Pil", which name a backend.
RULES: dict[str, ResizeRule] = {
    "Qwen2VLImageProcessor": qwen.RULE,
    "Qwen2_5_VLImageProcessor": qwen.RULE,
    "Glm4vImageProcessor": glm4v.RULE,
    "Glm46VImageProcessor": glm4v.RULE,
    "Glm5NextImageProcessor": glm5_next.RULE,
}

# For a file that names no image processor: the start of config.json's model_type.
_BY_MODEL_TYPE = {
    "qwen": "Qwen2VLImageProcessor",
    "glm4v": "Glm4vImageProcessor",
    "glm46v": "Glm46VImageProcessor",
    "glm_ocr": "Glm46VImageProcessor",
    "glm5": "Glm5NextImageProcessor",
}

_TOWER_FIELDS = ("patch_size", "merge_size", "temporal_patch_size")


def rule_of(settings: Mapping[str, Any], model_type: str = "") -> ResizeRule:
    """The rule that `image_processor_type` names, else the one of the model's family.

    Raises ValueError that lists the known image processors.
    """
    stated = settings.get("image_processor_type")
    if stated is None:
        stated = next((kind for start, kind in _BY_MODEL_TYPE.items() if model_type.startswith(start)), None)
    name = str(stated).removesuffix("Fast").removesuffix("Pil")
    if name not in RULES:
        raise ValueError(
            f"preprocessor: image_processor_type is {stated!r} (model_type {model_type!r}); supported: "
            f"{', '.join(sorted(RULES))}"
        )
    return RULES[name]


def read_processor(
    settings: Mapping[str, Any],
    *,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    model_type: str = "",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    min_image_tokens: int | None = None,
    max_image_tokens: int | None = None,
    max_decoded_pixels: int = 64_000_000,
    max_patches: int | None = None,
) -> ImageProcessor:
    """An ImageProcessor from a parsed preprocessor_config.json.

    patch_size, merge_size, temporal_patch_size, model_type: the checkpoint's; the last matters only where the file
    names no `image_processor_type`.
    min_pixels, max_pixels or min_image_tokens, max_image_tokens: override the file's bounds, each side in one unit.
    The file's are `min_image_tokens` / `max_image_tokens` for GLM-5-Next, else `size` (shortest_edge / longest_edge,
    which count pixels of area), for Qwen also `min_pixels` / `max_pixels`; the reference's defaults where it has none.
    Raises ValueError for settings that are not supported or do not fit the tower.
    """
    tower = dict(zip(_TOWER_FIELDS, (patch_size, merge_size, temporal_patch_size), strict=True))
    for name, want in tower.items():
        if settings.get(name, want) != want:
            raise ValueError(f"preprocessor: {name} is {settings[name]} but the vision tower has {want}")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not settings.get(name, True):
            raise ValueError(f"preprocessor: {name} is off, which is not supported")
    if (resample := settings.get("resample", 3)) != Image.Resampling.BICUBIC:
        raise ValueError(f"preprocessor: resample is {resample}; only 3 (bicubic) is supported")
    if not math.isclose(factor := settings.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise ValueError(f"preprocessor: rescale_factor is {factor}; only 1/255 is supported")
    rule = rule_of(settings, model_type)
    frames = temporal_patch_size if rule.counts_frames else 1
    pixels_per_token = frames * (patch_size * merge_size) ** 2
    least, most = rule.read_bounds(settings, pixels_per_token)
    least = _bound("min", min_pixels, min_image_tokens, pixels_per_token, least)
    most = _bound("max", max_pixels, max_image_tokens, pixels_per_token, most)
    if least is None or most is None:
        raise ValueError(
            "preprocessor: size lacks shortest_edge or longest_edge, and min_pixels or max_pixels is not set"
        )
    return ImageProcessor(
        **tower,
        min_pixels=least,
        max_pixels=most,
        mean=_three(settings, "image_mean", CLIP_MEAN),
        std=_three(settings, "image_std", CLIP_STD),
        max_decoded_pixels=max_decoded_pixels,
        max_patches=max_patches,
        rule=rule,
    )


def _bound(side: str, pixels: int | None, tokens: int | None, pixels_per_token: int, stated: int | None) -> int | None:
    if pixels is not None and tokens is not None:
        raise ValueError(f"{side}_pixels {pixels} and {side}_image_tokens {tokens} are both set; set one")
    if tokens is not None:
        return tokens * pixels_per_token
    return stated if pixels is None else pixels


def _three(settings: Mapping[str, Any], name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    values = settings.get(name, default)
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise ValueError(f"preprocessor: {name} is {values!r}; it must be three numbers")
    return float(values[0]), float(values[1]), float(values[2])
