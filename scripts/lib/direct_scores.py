"""Log-probabilities of a text from a checkpoint's decoder, run directly: without server, scheduler and sampling."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from serving.batch import Packer, samples_of
from serving.config import EngineConfig
from serving.lm import LanguageModel, LmShapes
from serving.models import bind_decoder
from serving.models.decoder import Selection
from serving.protocol import SamplingParams, Submission
from serving.scheduler import Chunk
from serving.sequence import Sequence
from vitstripe.checkpoint import Checkpoint, load, raise_problems
from vitstripe.mesh import make_mesh

ROWS = 64


class DirectScores:
    """A decoder in float32 on one device. Texts of at most `longest` tokens."""

    def __init__(self, folder: Path, longest: int = 1024):
        checkpoint, mesh = Checkpoint(folder), make_mesh(1)
        # As many requests as rows: each row of a pass then gives its own logits.
        self._config = EngineConfig(max_model_len=longest, max_seqs=ROWS, prefill_tokens=ROWS)
        binding = bind_decoder(checkpoint, tp=1, dtype=jnp.float32)
        raise_problems(checkpoint, [binding])
        self._weights = tuple(jax.tree.leaves(load(checkpoint, binding, mesh)))
        self._lm = LanguageModel(
            binding.graphdef, binding.abstract, mesh, self._config, LmShapes(self._config.pages_per_seq)
        )
        self._packer = Packer(self._config, self._config.pages_per_seq, gather_pages=self._lm.gather_pages)
        self._caches, self._seats = self._lm.new_caches(), self._lm.new_seats()
        self._splice = self._lm.splice(ROWS).compile()
        self._extend = self._lm.extend(ROWS, Selection(None)).compile()

    def logits(self, ids: list[int]) -> np.ndarray:
        """float32 [T, V] of every token of a text."""
        positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
        seq = Sequence(Submission("", ids, (), SamplingParams(1)), lambda event: None, positions, 0, seed=0)
        seq.add_pages(range(self._config.pages_per_seq))
        found = []
        for start in range(0, len(ids), ROWS):
            chunk = Chunk(seq, start, min(start + ROWS, len(ids)))
            tokens, _, step = self._packer.extend([chunk], ROWS)
            step = replace(step, last_rows=np.arange(ROWS, dtype=np.int32))
            hidden = self._splice(self._weights, tokens)
            levels = self._lm.decoder.num_deepstack
            deep = jnp.zeros((levels, *hidden.shape), hidden.dtype) if levels else None
            samples = samples_of([], ROWS)
            out = self._extend(self._weights, (hidden, deep), self._caches, step.packed(), samples, self._seats)
            self._caches, self._seats = out.caches, out.seats
            found.append(np.asarray(out.logits)[: chunk.stop - chunk.start])
        return np.concatenate(found)

    def of(self, ids: list[int], start: int) -> tuple[float, bool]:
        """(log-probability of ids[start:] after ids[:start], whether each of them is the most likely one)."""
        x = self.logits(ids)[start - 1 : -1].astype(np.float64)
        x -= x.max(-1, keepdims=True)
        x -= np.log(np.exp(x).sum(-1, keepdims=True))
        following = np.array(ids[start:])
        return float(x[np.arange(len(following)), following].sum()), bool((x.argmax(-1) == following).all())
