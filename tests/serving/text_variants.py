"""Text decoders in configurations that the golden checkpoints do not have. Their weights follow from their shapes."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers import GOLDENS, det
from tests.serving.harness import Driver, checkpoint_at

FOLDER = GOLDENS / "text_variants"


def weights_of(name: str) -> dict[str, np.ndarray]:
    """bfloat16, by tensor name: 0.3 * `det` with the seed 100 + the tensor's place in alphabetical order; norms are one
    more than that."""
    shapes = json.loads((FOLDER / name / "shapes.json").read_text())
    found = {}
    for i, (tensor, shape) in enumerate(sorted(shapes.items())):
        is_norm = len(shape) == 1 and tensor.endswith("weight")
        values = 0.3 * det(tuple(shape), 100 + i) + (1 if is_norm else 0)
        found[tensor] = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
    return found


class Variant:
    """driver(tp): the decoder. logits(driver, cuts): of the whole prompt, prefilled in chunks that end at `cuts`.

    tensors: what the file holds, for a file in another spelling.
    """

    def __init__(self, name: str, folder: Path, tensors: dict[str, np.ndarray] | None = None, **fields):
        shutil.copy(FOLDER / name / "config.json", folder)
        save_file(weights_of(name) if tensors is None else tensors, folder / "model.safetensors")
        self.golden = load_file(FOLDER / name / "golden_text.safetensors")
        self.folder, self.fields = folder, fields

    def driver(self, tp: int) -> Driver:
        checkpoint = checkpoint_at(self.folder, **self.fields)
        checkpoint.config.pop("vision_config", None)
        return Driver(checkpoint, tp)

    def logits(self, driver: Driver, cuts: list[int], selection) -> np.ndarray:
        seq = driver.sequence(self.golden["input_ids"], positions=self.golden.get("positions"))
        return driver.prefill(seq, cuts, selection)
