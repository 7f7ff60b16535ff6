"""The prompt with two images that each family's reference outputs were made from, ready for a `Driver`."""

import json
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load_file

from serving.positions import mrope_positions
from serving.protocol import ImageSpan
from serving.sequence import Sequence
from tests.helpers import det
from tests.serving.harness import Driver, checkpoint_at
from vitbatch import PreparedImage, VisionEncoder
from vitbatch.encoder import Frame

IMAGE_TOKEN = 261
POOL_ROWS = 37


class GoldenPrompt:
    """golden: the reference outputs. driver(tp): the family's decoder, its pool holding the images' rows in shuffled
    slots. sequence(driver): the prompt as a request.

    mrope: whether the family's positions are those of M-RoPE. fields: of config.json, replaced.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, mrope: bool = True, **fields):
        self.folder, self.mrope, self.fields = folder, mrope, fields
        self.golden = load_file(folder / "golden_text.safetensors")
        self.ids = self.golden["img.input_ids"][0]
        self.grids = [tuple(g) for g in self.golden["img.grid_thw"].tolist()]
        before = np.roll(self.ids, 1)
        self.starts = np.flatnonzero((self.ids == IMAGE_TOKEN) & (before != IMAGE_TOKEN)).tolist()
        rows = self._image_rows(mesh)
        self.pool = np.full((POOL_ROWS, rows[0].shape[1]), 7.0, np.float32)
        self.slots, order = [], iter(np.random.default_rng(0).permutation(POOL_ROWS).astype(np.int32))
        for image in rows:
            self.slots.append(np.array([next(order) for _ in image], np.int32))
            self.pool[self.slots[-1]] = image
        self._drivers: dict[int, Driver] = {}

    def _image_rows(self, mesh: Mesh) -> list[np.ndarray]:
        """The tower's rows, from the same float inputs that the reference was given."""
        meta = json.loads((self.folder / "meta.json").read_text())["text"]["pixel_values"]
        pixels, frames, at = det(meta["shape"], meta["seed"]), [], 0
        for _, h, w in self.grids:
            frames.append(Frame(pixels[at : at + h * w], (h, w)))
            at += h * w
        return VisionEncoder.from_checkpoint(self.folder, mesh=mesh).encode_frames(frames)

    def driver(self, tp: int) -> Driver:
        if tp not in self._drivers:
            self._drivers[tp] = Driver(checkpoint_at(self.folder, **self.fields), tp, self.pool)
        return self._drivers[tp]

    def sequence(self, driver: Driver, first_page: int = 0) -> Sequence:
        spans = tuple(
            ImageSpan(
                start, PreparedImage(np.ones((h * w, 768), np.uint8), (t, h, w), bytes([h] * 16), h * w // 4, (1, 1))
            )
            for start, (t, h, w) in zip(self.starts, self.grids, strict=True)
        )
        positions, delta = None, 0
        if self.mrope:
            positions, delta = mrope_positions(len(self.ids), [(s.start, s.image.grid_thw) for s in spans], merge=2)
        seq = driver.sequence(self.ids, spans, positions, delta, first_page)
        seq.slots = list(self.slots)
        return seq
