"""The vision tower of Qwen4-Exp: Qwen3.5's, unchanged. Source: Qwen4-Exp as released in transformers."""

from vitbatch.towers.qwen3_5 import FAMILY
from vitbatch.towers.registry import register

register(FAMILY, "qwen4_exp")
