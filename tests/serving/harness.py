"""Drives a decoder's own programs without the engine: one request, any chunking, logits of every token."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from serving.batch import Packer, samples_of
from serving.config import EngineConfig, bucket_for
from serving.lm import LanguageModel, LmShapes
from serving.models import bind_decoder, cache_formats
from serving.models.decoder import Selection
from serving.protocol import SamplingParams, Submission
from serving.scheduler import Chunk
from serving.sequence import Sequence
from tests.helpers import relative_error
from vitstripe.checkpoint import Checkpoint, load, raise_problems
from vitstripe.mesh import make_mesh
from vitstripe.platform import platform_of_mesh

REPLICATED = Selection(None)
CONFIG = EngineConfig(max_model_len=112, page_size=8, max_seqs=48, prefill_tokens=64)


def checkpoint_at(folder: Path, **fields) -> Checkpoint:
    """The checkpoint with some config.json fields replaced."""
    checkpoint = Checkpoint(folder)
    checkpoint.config |= fields
    return checkpoint


class Driver:
    """A decoder of `checkpoint` on tp devices, float32. pool: image row pool [rows, width], None for a text model."""

    def __init__(self, checkpoint: Checkpoint, tp: int, pool: np.ndarray | None = None, config: EngineConfig = CONFIG):
        self.mesh, self.config, self.pool = make_mesh(tp), replace(config, tp=tp), pool
        formats = cache_formats(checkpoint.config, config, platform_of_mesh(self.mesh))
        binding = bind_decoder(checkpoint, tp=tp, dtype=jnp.float32, formats=formats)
        raise_problems(checkpoint, [binding])
        self.weights = tuple(jax.tree.leaves(load(checkpoint, binding, self.mesh)))
        pages = 2 * self.config.pages_per_seq
        shapes = LmShapes(pages, *((0, 0) if pool is None else pool.shape))
        self.lm = LanguageModel(binding.graphdef, binding.abstract, self.mesh, self.config, shapes)
        self.packer = Packer(self.config, pages, gather_pages=self.lm.gather_pages)
        self.caches, self.seats = self.lm.new_caches(), self.lm.new_seats()
        self.compiled = {}
        self.selections = []

    def sequence(self, ids, images=(), positions=None, delta=0, first_page=0) -> Sequence:
        """A request whose pages are interleaved with another's, so that logical and physical order differ."""
        if positions is None:
            positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
        submission = Submission(f"r{first_page}", [int(i) for i in ids], images, SamplingParams(1, temperature=0.0))
        seq = Sequence(submission, lambda event: None, positions, delta, seed=0)
        seq.add_pages(range(first_page, 2 * self.config.pages_per_seq, 2)[::-1])
        seq.seat = first_page
        return seq

    def chunk(self, seq: Sequence, start: int, stop: int) -> Chunk:
        """The chunk that the scheduler would make for this decoder."""
        return Chunk(seq, start, stop, self.lm.row_align)

    def after_prefix(self, donor: Sequence, seq: Sequence, pages: int) -> Sequence:
        """`seq` with the first pages of another request in the place of its own, as the prefix cache puts them."""
        for page in range(pages):
            seq.swap_page(page, donor.pages[page])
        seq.computed = pages * self.config.page_size
        return seq

    def _call(self, program, *args):
        # The two merges of the stripes share a name, but not their collectives.
        key = (program.name, *sorted(program.collectives.items()))
        if key not in self.compiled:
            self.compiled[key] = program.compile()
        return self.compiled[key](self.weights, *args)

    def extend(self, chunks: list[Chunk], selection: Selection = REPLICATED) -> list[np.ndarray]:
        """Logits [tokens, V] of every token of each chunk."""
        rows = bucket_for(self.config.token_buckets, sum(c.rows for c in chunks))
        ids, pool_index, step = self.packer.extend(chunks, rows)
        at = np.cumsum([0] + [c.rows for c in chunks[:-1]])
        wanted = np.concatenate([a + np.arange(c.stop - c.start) for a, c in zip(at, chunks, strict=True)])
        step = replace(step, last_rows=np.resize(wanted, self.config.max_seqs).astype(np.int32))
        splice = self.lm.splice(rows)
        if self.pool is None:
            inputs = (self._call(splice, ids), None)
        else:
            hidden, deep = self._call(splice, ids, self.pool, pool_index)
            inputs = (hidden, deep if self.lm.decoder.num_deepstack else None)
        program = self.lm.extend(rows, selection, keep_selections=True)
        samples = samples_of([], self.config.max_seqs)
        out = self._call(program, inputs, self.caches, step.packed(), samples, self.seats)
        self.caches, self.seats, self.selections, self.hidden = out.caches, out.seats, out.selections, out.hidden
        logits = np.asarray(out.logits)[: len(wanted)]
        return np.split(logits, np.cumsum([c.stop - c.start for c in chunks])[:-1])

    def prefill(self, seq: Sequence, cuts: list[int], selection: Selection = REPLICATED) -> np.ndarray:
        """Logits [T, V] of the whole prompt, computed in chunks that end at `cuts`."""
        parts, start = [], 0
        for stop in [*cuts, len(seq.tokens)]:
            parts += self.extend([self.chunk(seq, start, stop)], selection)
            start = stop
        seq.computed = len(seq.tokens)
        return np.concatenate(parts)

    def greedy(self, seq: Sequence, first: int, count: int) -> list[int]:
        """`first` and the count - 1 tokens that greedy decoding puts after it."""
        seq.tokens.append(first)
        for _ in range(count - 1):
            seq.tokens.append(int(self.decode([seq])[0].argmax()))
        return seq.tokens[seq.prompt_length :]

    def decode(self, seqs: list[Sequence]) -> np.ndarray:
        """Logits [R, V] after the last token of up to 3 sequences, from one decode pass of 3."""
        latest = np.zeros(self.config.max_seqs, np.int32)
        latest[[s.seat for s in seqs]] = [s.tokens[-1] for s in seqs]
        step, samples = self.packer.decode(seqs, 3), samples_of(seqs, 3)
        out = self._call(self.lm.decode(3), latest, self.caches, step.packed(), samples, self.seats)
        self.caches, self.seats = out.caches, out.seats
        return np.asarray(out.logits)[: len(seqs)]


def check_chunks(driver: Driver, ids, cuts: list[int], *, decoded: int) -> None:
    """Chunks that end at `cuts`, and decode passes over the last `decoded` tokens, give the logits of one pass."""
    whole = driver.prefill(driver.sequence(ids), [])
    assert relative_error(driver.prefill(driver.sequence(ids), cuts), whole) < 2e-5
    seq = driver.sequence(ids[:-decoded])
    driver.prefill(seq, cuts)
    for at in range(len(ids) - decoded, len(ids)):
        seq.tokens.append(int(ids[at]))
        assert relative_error(driver.decode([seq])[0], whole[at]) < 2e-5
