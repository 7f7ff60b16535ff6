"""What a request must satisfy before it may wait, and how much may wait."""

import secrets
from collections.abc import Callable, Iterable

import numpy as np

from serving.config import EngineConfig
from serving.positions import mrope_positions
from serving.protocol import Event, InvalidRequest, Overloaded, Submission
from serving.sequence import Sequence
from vitbatch import VisionEncoder


class Admission:
    """Makes sequences of submissions. Holds no state: every thread may use it."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        encoder: VisionEncoder | None,
        *,
        eos_ids: frozenset[int],
        uses_mrope: bool,
    ):
        self._config, self._vocab, self._encoder = config, vocab_size, encoder
        self._eos, self._uses_mrope = eos_ids, uses_mrope

    def sequence(self, submission: Submission, on_event: Callable[[Event], None]) -> Sequence:
        """Raises InvalidRequest for what can never be served."""
        length = len(submission.prompt_ids)
        self._check_tokens(submission)
        self._check_images(submission)
        if self._uses_mrope:
            merge = self._encoder.vision_config.merge_size if self._encoder is not None else 1
            spans = [(s.start, s.image.grid_thw) for s in submission.images]
            positions, delta = mrope_positions(length, spans, merge)
        else:
            positions, delta = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length)), 0
        seed = submission.params.seed
        seed = secrets.randbits(64) if seed is None else seed
        ends = frozenset(submission.params.stop_token_ids)
        if not submission.params.ignore_eos:
            ends |= self._eos
        return Sequence(submission, on_event, positions, delta, seed, ends=ends)

    def _check_tokens(self, submission: Submission) -> None:
        ids, limit = submission.prompt_ids, self._config.max_model_len
        if not ids:
            raise InvalidRequest("the prompt has no tokens")
        if len(ids) + submission.params.max_tokens > limit:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens and max_tokens is {submission.params.max_tokens}, together over the "
                f"model's {limit}; shorten the prompt or lower max_tokens"
            )
        if min(ids) < 0 or max(ids) >= self._vocab:
            raise InvalidRequest(f"a prompt token id is outside 0 .. {self._vocab - 1}")

    def _check_images(self, submission: Submission) -> None:
        encoder, spans = self._encoder, submission.images
        if not spans:
            return
        if encoder is None:
            raise InvalidRequest("this model takes no images")
        for span in spans:
            try:
                encoder.check(span.image)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error
        at = 0
        for number, span in enumerate(spans):
            if span.start < at or span.stop > len(submission.prompt_ids):
                raise InvalidRequest(
                    f"image {number} takes tokens {span.start} to {span.stop - 1}, outside of what is left of the "
                    f"prompt, tokens {at} to {len(submission.prompt_ids) - 1}"
                )
            at = span.stop
        rows, room = sum({s.image.key: s.image.num_tokens for s in spans}.values()), encoder.pool.shape[0]
        if rows > room:
            raise InvalidRequest(
                f"the images have {rows} tokens together, over the {room} the server holds; "
                f"send fewer or smaller images"
            )


def _image_bytes(seqs: Iterable[Sequence]) -> int:
    """Host memory the prepared images hold; the choices of one request share theirs."""
    return sum({id(span.image): span.image.patches.nbytes for s in seqs for span in s.images}.values())


def check_room(config: EngineConfig, known: Iterable[Sequence], seq: Sequence) -> None:
    """Raises Overloaded when a request would make too many, too long or too large ones wait. known: every request that
    is not over yet."""
    known = list(known)
    if len(known) >= config.max_queue + config.max_seqs:
        raise Overloaded(f"{len(known)} requests are running or waiting; try again", 1.0, "queue_full")
    queued = sum(s.prompt_length for s in known if not s.admitted)
    if queued and queued + seq.prompt_length > config.queue_tokens:
        raise Overloaded(f"{queued} prompt tokens are waiting; try again", 1.0, "queue_full")
    held = _image_bytes(known)
    if held and _image_bytes([*known, seq]) > config.max_held_image_bytes:
        raise Overloaded(f"the images of waiting requests hold {held >> 20} MiB; try again", 2.0, "queue_full")
