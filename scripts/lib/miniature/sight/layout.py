"""Shapes of batches, and how the tower sees a picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np

from vitbatch.images import ImageProcessor, read_processor
from vitbatch.planning import merge_order
from vitbatch.towers import family_of


@dataclass(frozen=True)
class Layout:
    """One shape of batch. rows: of tokens; images: a row at most; patches: an image at most; tokens, answers (answer
    tokens), questions: a row at most. longest, ratio: sides of the pictures drawn for it, and their largest ratio."""

    rows: int
    images: int
    patches: int
    tokens: int
    questions: int = 4
    answers: int = 24
    sides: tuple[int, int] = (56, 128)
    ratio: float = 3.0

    def shapes(self, features: int) -> dict[str, jax.ShapeDtypeStruct]:
        """features: bytes of a patch of one frame.

        pixels [B*I, P, F]; places, tap_index, tap_weight: of each patch, see vitbatch.lanes; count [B*I]: patches of
        each picture, 0 for none. ids, segment, positions, rows: of each token; rows is the picture token that stands
        there, -1 for text. at, targets, slot: index of the token before each answer token, that token, its question.
        task [B, Q].
        """
        B, N, P, T, A = self.rows, self.rows * self.images, self.patches, self.tokens, self.answers
        kinds = {
            "pixels": ((N, P, features), np.uint8),
            "places": ((N, P, 2), np.int32),
            "tap_index": ((N, P, 4), np.int32),
            "tap_weight": ((N, P, 4), np.float32),
            "count": ((N,), np.int32),
            "ids": ((B, T), np.int32),
            "segment": ((B, T), np.int32),
            "positions": ((B, 3, T), np.int32),
            "rows": ((B, T), np.int32),
            "at": ((B, A), np.int32),
            "targets": ((B, A), np.int32),
            "slot": ((B, A), np.int32),
            "task": ((B, self.questions), np.int32),
        }
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in kinds.items()}


@dataclass(frozen=True)
class VisionPlan:
    """A tower's geometry and its image processor, from the files of the folder."""

    config: Any
    preprocessor: Any

    @cached_property
    def vision(self) -> Any:
        return family_of(self.config["model_type"]).read_config(self.config)

    @cached_property
    def processor(self) -> ImageProcessor:
        v = self.vision
        return read_processor(
            self.preprocessor,
            patch_size=v.patch_size,
            merge_size=v.merge_size,
            temporal_patch_size=v.temporal_patch_size,
            model_type=v.model_type,
        )

    @property
    def patch(self) -> int:
        return self.vision.patch_size

    @property
    def merge(self) -> int:
        return self.vision.merge_size

    @property
    def features(self) -> int:
        return self.vision.patch_pixels

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        return self.processor.fit(height, width).canvas

    def patches(self, height: int, width: int) -> int:
        h, w = self.canvas(height, width)
        return h * w // self.patch**2

    @cached_property
    def grid(self):
        """(gh, gw) -> places int32 [N, 2], table rows int32 [N, 4] and weights float32 [N, 4] of a grid's patches."""
        family, vision = family_of(self.config["model_type"]), self.vision

        @cache
        def of(gh: int, gw: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            return merge_order(gh, gw, vision.merge_size), *family.position_taps(vision, gh, gw)

        return of


def hf_config(size: Mapping[str, Any], ids: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """config.json of Sight. size: see miniature.SIZES; ids: of the special tokens."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "head_dim": size["head_dim"],
            "hidden_act": "silu",
            "hidden_size": size["hidden"],
            "initializer_range": 0.02,
            "intermediate_size": size["mlp"],
            "max_position_embeddings": 4096,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": size["heads"],
            "num_hidden_layers": size["layers"],
            "num_key_value_heads": size["kv_heads"],
            "pad_token_id": ids["<|endoftext|>"],
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": size["mrope"],
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": vocabulary,
        },
        "tie_word_embeddings": True,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": size["deepstack"],
            "depth": size["depth"],
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": size["vision"],
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": size["vision_mlp"],
            "model_type": "qwen3_vl",
            "num_heads": size["vision_heads"],
            "num_position_embeddings": 256,
            "out_hidden_size": size["hidden"],
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def hf_preprocessor() -> dict[str, Any]:
    """preprocessor_config.json: pictures of 36 to 144 tokens."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "size": {"shortest_edge": 96 * 96, "longest_edge": 192 * 192},
    }
