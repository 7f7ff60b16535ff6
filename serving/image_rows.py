"""The engine's side of the image row pool: what a prefill pass needs is encoded in one planned call and pinned."""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import jax

from serving.metrics import Metrics
from serving.scheduler import Chunk
from serving.sequence import Sequence
from vitbatch import PoolFull, VisionEncoder

logger = logging.getLogger("serving.engine")


class ImageRows:
    """Rows of the images of running requests. Not thread-safe: the engine thread owns it.

    fail: ends a request whose images cannot be encoded, with a message for the log. beat: called around each call of
    the devices.
    """

    def __init__(
        self,
        encoder: VisionEncoder | None,
        metrics: Metrics,
        *,
        fail: Callable[[Sequence, str], None],
        beat: Callable[[str], None],
    ):
        self._encoder, self._metrics, self._fail, self._beat = encoder, metrics, fail, beat
        self._seen = (0, 0, 0)

    def ready(self, chunks: Seq[Chunk]) -> list[Chunk]:
        """The chunks whose images are all in the row pool, after encoding what is missing. A request whose images find
        no room now keeps its place and is tried again in the next step; one whose images fail is ended."""
        missing = {c.seq: [i for i in c.seq.images_in(c.start, c.stop) if c.seq.slots[i] is None] for c in chunks}
        wanting = [seq for seq, images in missing.items() if images]
        if not wanting:
            return list(chunks)
        assert self._encoder is not None
        groups = [wanting] if self._encoder.batches_requests() else [[seq] for seq in wanting]
        for group in groups:
            self._encode(self._encoder, group, missing)
        return [c for c in chunks if not c.seq.closed and all(c.seq.slots[i] is not None for i in missing[c.seq])]

    def release(self, seq: Sequence, done_before: int | None = None) -> None:
        """Unpins a request's encoded images; with done_before only those that end at or before that token: rows whose
        tokens are all in the paged cache are needed no more, unless the request is preempted and starts over."""
        if self._encoder is None:
            return
        for i, span in enumerate(seq.images):
            if seq.slots[i] is not None and (done_before is None or span.stop <= done_before):
                self._encoder.release([span.image.key])
                seq.slots[i] = None

    def release_youngest(self, seqs: Iterable[Sequence]) -> None:
        """For when nothing can run: requests wait for room while each holds a part of it, and the youngest lets go."""
        holders = [s for s in seqs if any(slots is not None for slots in s.slots)]
        if holders:
            self.release(max(holders, key=lambda s: s.order))

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Raises RuntimeError unless the pinned rows are those of these requests."""
        held = {s.images[i].image.key: len(slots) for s in seqs for i, slots in enumerate(s.slots) if slots is not None}
        if self._encoder is not None and self._encoder.cache.tokens_pinned != sum(held.values()):
            raise RuntimeError(
                f"{self._encoder.cache.tokens_pinned} pool rows are pinned, requests hold {sum(held.values())}"
            )

    def report(self) -> None:
        """Adds what the encoder's cache did since the last report to the metrics."""
        if self._encoder is None:
            return
        cache = self._encoder.cache
        now = (cache.hits, cache.misses, cache.evictions)
        hits, misses, evictions = (a - b for a, b in zip(now, self._seen, strict=True))
        self._metrics.encoder_cache(hits=hits, misses=misses, evictions=evictions, pinned=cache.tokens_pinned)
        self._seen = now

    def _encode(self, encoder: VisionEncoder, group: Seq[Sequence], missing: dict[Sequence, list[int]]) -> None:
        """Encodes the missing images of a group of requests, all in one call if that works."""
        wanted = [(seq, i) for seq in group for i in missing[seq]]
        self._beat("encoding images")
        try:
            out = encoder.encode_to_pool([seq.images[i].image for seq, i in wanted])
        except PoolFull:
            return self._one_by_one(encoder, group, missing)
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) or encoder.pool.is_deleted():
                raise  # the devices failed, not the image
            if len(group) == 1:
                logger.exception("request %s: encoding failed", group[0].request_id)
                return self._fail(group[0], f"{type(error).__name__} while encoding the images")
            return self._one_by_one(encoder, group, missing)
        finally:
            self._beat("")
        for (seq, i), slots, call in zip(wanted, out.slots, out.call_of, strict=True):
            seq.slots[i] = slots
            number = None if call is None else out.calls[call].call_id
            if number is not None and number not in seq.calls:
                seq.calls.append(number)
        for call in out.calls:
            self._metrics.vit_call(images=call.images, lanes_filled=call.lanes_filled, padded_ratio=call.padded_ratio)
        return None

    def _one_by_one(self, encoder: VisionEncoder, group: Seq[Sequence], missing: dict[Sequence, list[int]]) -> None:
        if len(group) > 1:
            for seq in group:
                self._encode(encoder, [seq], missing)
