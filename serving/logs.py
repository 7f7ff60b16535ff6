"""Logs: one JSON object a line, whatever is logged; a stack trace too."""

import json
import logging
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """time, level, logger, and either the fields that came with the record (`extra={"fields": {...}}`) or its text."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": stamp, "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def to_stderr() -> None:
    """Sends every log to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)  # an import may have set up its own
    # The engine and the HTTP side log one line a request; jax, orbax and absl would drown them.
    for name in ("jax", "absl", "orbax", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
