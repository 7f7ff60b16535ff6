"""The OpenAI-compatible HTTP API."""

from serving.api.app import create_app
from serving.api.limits import Limits

__all__ = ["Limits", "create_app"]
