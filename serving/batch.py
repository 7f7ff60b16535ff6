"""Host arrays of one pass: packs chunks or decode rows into the fixed shapes of a program. numpy only."""

from collections.abc import Sequence as Seq

import numpy as np

from serving.config import ROW_TILE, EngineConfig
from serving.models.step import Step
from serving.protocol import SamplingParams
from serving.sampling import NOT_SEATED, SampleArgs
from serving.scheduler import Chunk
from serving.sequence import NO_SEAT, Sequence


def samples_of(seqs: Seq[Sequence], size: int) -> SampleArgs:
    """Sampling arguments of the first len(seqs) of `size` requests; the rest are greedy and ignored."""
    seats = [s.seat if s.submission.params.shapes_logits else NOT_SEATED for s in seqs]
    return SampleArgs.stack([s.sampling for s in seqs], [s.generated for s in seqs], seats, size)


def samples_after(chunks: Seq[Chunk], size: int) -> SampleArgs:
    """Sampling arguments of a prefill pass. What is drawn after a chunk that does not end its prompt is not used: it
    must not be counted as generated, and nobody asks for its log-probabilities."""
    drawn = [c if c.finishes_prompt else None for c in chunks]
    rows = [c.seq.sampling if c else _UNUSED for c in drawn]
    seats = [c.seq.seat if c and c.seq.submission.params.shapes_logits else NOT_SEATED for c in drawn]
    return SampleArgs.stack(rows, [c.seq.generated for c in chunks], seats, size)


def following_tokens(chunks: Seq[Chunk], rows: int) -> np.ndarray:
    """The token after each row of a prefill pass, int32 [rows]; 0 where there is none, or it is not known yet."""
    following, at = np.zeros(rows, np.int32), 0
    for chunk in chunks:
        tokens = chunk.seq.tokens[chunk.start + 1 : chunk.stop + 1]
        following[at : at + len(tokens)] = tokens
        at += chunk.rows
    return following


_UNUSED = SampleArgs.rows(SamplingParams(1, temperature=0.0), 0)


class Packer:
    """Fills Step arrays. drop_slot: a slot past the pool, where padding rows are written to be dropped."""

    def __init__(self, config: EngineConfig, pages: int, *, gather_pages: int):
        self.config, self.gather_pages = config, gather_pages
        self.drop_slot = pages * config.page_size

    def _slots(self, seq: Sequence, start: int, stop: int) -> np.ndarray:
        at, size = np.arange(start, stop), self.config.page_size
        return seq.table[at // size] * size + at % size

    def _table(self, seqs: Seq[Sequence], size: int) -> np.ndarray:
        table = np.zeros((size, self.config.pages_per_seq), np.int32)
        for r, seq in enumerate(seqs):
            table[r, : seq.page_count] = seq.table
        return table

    def extend(self, chunks: Seq[Chunk], rows: int) -> tuple[np.ndarray, np.ndarray, Step]:
        """(ids [rows], pool_index [rows], Step) of a prefill pass. The chunks must fit."""
        keys = self.gather_pages
        ids, pool_index = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
        positions, slots = np.zeros((3, rows), np.int32), np.full(rows, self.drop_slot, np.int32)
        lengths, tiles = np.zeros(rows, np.int32), np.zeros(rows // ROW_TILE, np.int32)
        most = self.config.max_seqs
        last, key_pages = np.zeros(most, np.int32), np.zeros(keys, np.int32)
        starts = np.zeros(rows if keys else 0, np.int32)
        requests = np.zeros((5, most), np.int32)
        requests[0] = self._seats([c.seq for c in chunks], most)
        requests[4] = self._seats([c.seq if c.finishes_prompt else None for c in chunks], most)
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
            requests[1:4, r] = at, stop - start, start
            if keys:
                used = -(-stop // self.config.page_size)
                key_pages[key_at : key_at + used] = seq.table[:used]
                starts[at : at + chunk.rows] = key_at * self.config.page_size
                key_at += used
            at += chunk.rows
        table = self._table([c.seq for c in chunks], most)
        step = Step(positions, slots, lengths, tiles, table, last, key_pages, starts, requests)
        return ids, pool_index, step

    def decode(self, seqs: Seq[Sequence], size: int) -> Step:
        """The decode pass of each sequence's last token, which is one of its answer, and lies in its seat."""
        lengths = np.zeros(size, np.int32)
        slots, positions = np.full(size, self.drop_slot, np.int32), np.zeros(size, np.int32)
        here, page_size = slice(len(seqs)), self.config.page_size
        lengths[here] = [s.length for s in seqs]
        at = lengths[here] - 1
        positions[here] = at + np.array([s.delta for s in seqs], np.int32)
        table = self._table(seqs, size)
        slots[here] = table[np.arange(len(seqs)), at // page_size] * page_size + at % page_size
        every, none, seats = np.arange(size, dtype=np.int32), np.zeros(0, np.int32), self._seats(seqs, size)
        requests = np.stack([seats, every, np.minimum(lengths, 1), np.maximum(lengths - 1, 0), seats])
        return Step(np.tile(positions, (3, 1)), slots, lengths, every, table, every, none, none, requests)

    def _seats(self, seqs: Seq[Sequence | None], size: int) -> np.ndarray:
        """The seat of each request, int32 [size]; one past the last for None and for padding."""
        seats = np.full(size, NO_SEAT, np.int32)
        seats[: len(seqs)] = [NO_SEAT if s is None else s.seat for s in seqs]
        return np.where(seats == NO_SEAT, self.config.max_seqs, seats).astype(np.int32)
