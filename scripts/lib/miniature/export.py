"""Writes a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], files: Mapping[str, str], card: str) -> int:
    """model.safetensors (as transformers writes it, names sorted), the small files and README.md; bytes in all."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", metadata={"format": "pt"})
    for name, text in {**files, "README.md": card}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sum((folder / name).stat().st_size for name in ("model.safetensors", "README.md", *files))
