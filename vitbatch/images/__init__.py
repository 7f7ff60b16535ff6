"""Images on the host: bytes -> upright RGB -> resized canvas -> patch rows. Pillow and numpy only, thread-safe.

decode.py reads files; qwen.py, glm4v.py and glm5_next.py hold one resize rule each; settings.py picks the rule that a
checkpoint's preprocessor_config.json names; processor.py puts them together.
"""

from vitbatch.images.patches import patchify
from vitbatch.images.prepared import ImageError, PreparedImage
from vitbatch.images.processor import ImageProcessor
from vitbatch.images.qwen import largest_canvas, smart_resize
from vitbatch.images.rules import Fit, ResizeRule
from vitbatch.images.settings import RULES, read_processor, rule_of

__all__ = [
    "RULES",
    "Fit",
    "ImageError",
    "ImageProcessor",
    "PreparedImage",
    "ResizeRule",
    "largest_canvas",
    "patchify",
    "read_processor",
    "rule_of",
    "smart_resize",
]
