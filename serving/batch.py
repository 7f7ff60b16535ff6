"""Host arrays of one pass: packs chunks or decode rows into the fixed shapes of a program. numpy only."""

from collections.abc import Sequence as Seq

import numpy as np

from serving.config import ROW_TILE, EngineConfig
from serving.models.step import Step
from serving.sampling import SampleArgs
from serving.scheduler import Chunk
from serving.sequence import Sequence


def samples_of(seqs: Seq[Sequence], size: int) -> SampleArgs:
    """Sampling arguments of the first len(seqs) of `size` requests; the rest are greedy and ignored."""
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seed, index = np.zeros(size, np.uint32), np.zeros(size, np.int32)
    for r, seq in enumerate(seqs):
        params = seq.submission.params
        temperature[r], top_p[r], seed[r], index[r] = params.temperature, params.top_p, seq.seed, seq.generated
    return SampleArgs(temperature=temperature, top_p=top_p, seed=seed, index=index)


class Packer:
    """Fills Step arrays. drop_slot: a slot past the pool, where padding rows are written to be dropped."""

    def __init__(self, config: EngineConfig, pages: int, *, gather_pages: int):
        self.config, self.gather_pages = config, gather_pages
        self.drop_slot = pages * config.page_size

    def _slots(self, seq: Sequence, start: int, stop: int) -> np.ndarray:
        at, size = np.arange(start, stop), self.config.page_size
        return np.asarray(seq.pages, np.int32)[at // size] * size + at % size

    def _table(self, seqs: Seq[Sequence], size: int) -> np.ndarray:
        table = np.zeros((size, self.config.pages_per_seq), np.int32)
        for r, seq in enumerate(seqs):
            table[r, : len(seq.pages)] = seq.pages
        return table

    def extend(self, chunks: Seq[Chunk], rows: int) -> tuple[np.ndarray, np.ndarray, Step]:
        """(ids [rows], pool_index [rows], Step) of a prefill pass. The chunks must fit."""
        keys = self.gather_pages
        ids, pool_index = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
        positions, slots = np.zeros((3, rows), np.int32), np.full(rows, self.drop_slot, np.int32)
        lengths, tiles = np.zeros(rows, np.int32), np.zeros(rows // ROW_TILE, np.int32)
        last, key_pages = np.zeros(self.config.max_seqs, np.int32), np.zeros(keys, np.int32)
        starts = np.zeros(rows if keys else 0, np.int32)
        at = key_at = 0
        for r, chunk in enumerate(chunks):
            seq, start, stop = chunk.seq, chunk.start, chunk.stop
            here = slice(at, at + stop - start)
            ids[here] = seq.tokens[start:stop]
            pool_index[here] = seq.pool_index_of(start, stop)
            positions[:, here] = seq.positions_of(start, stop)
            slots[here] = self._slots(seq, start, stop)
            lengths[here] = np.arange(start, stop) + 1
            tiles[at // ROW_TILE : (at + chunk.rows) // ROW_TILE] = r
            last[r] = here.stop - 1
            if keys:
                used = -(-stop // self.config.page_size)
                key_pages[key_at : key_at + used] = seq.pages[:used]
                starts[at : at + chunk.rows] = key_at * self.config.page_size
                key_at += used
            at += chunk.rows
        table = self._table([c.seq for c in chunks], self.config.max_seqs)
        step = Step(positions, slots, lengths, tiles, table, last, key_pages, starts)
        return ids, pool_index, step

    def decode(self, seqs: Seq[Sequence], size: int) -> tuple[np.ndarray, Step]:
        """(ids [size], Step) of a decode pass: each sequence's last token."""
        ids, positions = np.zeros(size, np.int32), np.zeros((3, size), np.int32)
        slots, lengths = np.full(size, self.drop_slot, np.int32), np.zeros(size, np.int32)
        for r, seq in enumerate(seqs):
            end = len(seq.tokens)
            ids[r], lengths[r] = seq.tokens[-1], end
            positions[:, r] = seq.positions_of(end - 1, end)[:, 0]
            slots[r] = self._slots(seq, end - 1, end)[0]
        every, none = np.arange(size, dtype=np.int32), np.zeros(0, np.int32)
        table = self._table(seqs, size)
        step = Step(positions, slots, lengths, every, table, every, none, none)
        return ids, step
