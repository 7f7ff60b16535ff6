"""The answers of one request to its client: one body, or a stream of chunks."""

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from serving.api.answers import Answer, Outcome, Totals, Whole
from serving.api.choice import Order, Piece
from serving.api.errors import ApiError, internal
from serving.api.generation import Generation
from serving.api.logprobs import ChatLogprobs, CompletionLogprobs
from serving.api.prompts import Prompt
from serving.api.schemas import Options
from serving.api.sse import DONE, event
from serving.chat import AnswerParser, Message, Text
from serving.chat.deltas import joined
from serving.protocol import SamplingParams, Submission, TokenEvent
from serving.stream import AnswerStream, Detokenizer
from serving.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """What a choice shows beside its deltas: `echo` comes in front of its text; `logprobs` None tells nothing."""

    echo: str = ""
    logprobs: ChatLogprobs | CompletionLogprobs | None = None

    def told(self, tokens: Sequence[TokenEvent]) -> dict[str, Any] | None:
        return None if self.logprobs is None else self.logprobs.body(tokens)


def orders_of(
    answer: Answer,
    prompts: Sequence[tuple[Prompt, SamplingParams]],
    options: Options,
    tokenizer: Tokenizer,
    eos_ids: frozenset[int],
    parser: Callable[[], AnswerParser],
) -> list[tuple[Order, Shown]]:
    """The n answers of the first prompt, those of the second, and so on, which is the order of the choices."""
    made = []
    for prompt, params in prompts:
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        for k in range(options.n):
            name = f"{answer.id}-{len(made)}" if len(prompts) * options.n > 1 else answer.id
            seeded = replace(params, seed=choice_seed(params.seed, k))
            submission = Submission(name, prompt.ids, prompt.images, seeded, options.cache_salt)
            stream = AnswerStream(tokenizer, options.text, parser())
            order = Order(submission, stream, ends, score_only=options.score_only, first_of_prompt=k == 0)
            made.append((order, _shown(answer, prompt, params, options, tokenizer)))
    return made


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of the n-th answer to a prompt. The first one has the request's own; the others differ, and are the same
    whenever the request is."""
    if seed is None or choice == 0:
        return seed
    mixed = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little", signed=True)


def _shown(answer: Answer, prompt: Prompt, params: SamplingParams, options: Options, tokenizer: Tokenizer) -> Shown:
    echo = ""
    if options.echo:
        text = Detokenizer(tokenizer, special=True)
        echo = "".join(map(text.push, prompt.ids)) + text.finish()
    if params.logprobs is None:
        return Shown(echo)
    if answer.kind == "chat":
        return Shown(echo, ChatLogprobs(tokenizer))
    writer = CompletionLogprobs(
        tokenizer,
        prompt.ids if options.echo else (),
        as_ids=options.tokens_as_ids,
        special=options.text.special,
        only_prompt=options.score_only,
    )
    return Shown(echo, writer)


class Delivery:
    """Reads a generation for one client. `close` must be called at the end, whatever happened."""

    def __init__(self, generation: Generation, answer: Answer, shown: Sequence[Shown]):
        self._generation, self._answer, self._shown = generation, answer, shown

    @property
    def _totals(self) -> Totals:
        return Totals(self._generation.usage, self._generation.reasoning_tokens)

    async def begin(self) -> None:
        """See Generation.begin."""
        await self._generation.begin()

    async def whole(self) -> dict[str, Any]:
        """The one body of an answer that is not streamed.

        Raises:
            ApiError: the engine failed.
        """
        messages = [Message(content=shown.echo) for shown in self._shown]
        tokens: list[list[TokenEvent]] = [[] for _ in self._shown]
        outcomes: dict[int, Outcome] = {}
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                messages[piece.index].add(piece.deltas)
                tokens[piece.index] += piece.tokens
                if piece.outcome is not None:
                    outcomes[piece.index] = piece.outcome
        choices = [
            Whole(message, outcomes[index], shown.told(tokens[index]))
            for index, (message, shown) in enumerate(zip(messages, self._shown, strict=True))
        ]
        return self._answer.whole(choices, self._totals)

    async def events(self, request_trace: str) -> AsyncGenerator[bytes, None]:
        """Encoded chunks. A failure is one error event and the end, without `[DONE]`: never a silently short stream."""
        answer = self._answer
        try:
            for index in range(len(self._shown)):
                opening = answer.opening(index)
                if opening is not None:
                    yield event(opening)
            echoes = {index: shown.echo for index, shown in enumerate(self._shown) if shown.echo}
            async with aclosing(self._generation.pieces()) as pieces:
                async for piece in pieces:
                    for chunk in self._chunks(piece, echoes.pop(piece.index, "")):
                        yield event(chunk)
            if answer.include_usage:
                yield event(answer.totals(self._totals))
            yield DONE
        except ApiError as error:
            yield event(error.body())
        except Exception:
            logger.exception("request %s failed while streaming", request_trace)
            yield event(internal(request_trace).body())

    def _chunks(self, piece: Piece, echo: str) -> list[dict[str, Any]]:
        """The tokens of a piece are told in its first chunk."""
        deltas = joined([Text("content", echo), *piece.deltas]) if echo else piece.deltas
        told = self._shown[piece.index].told(piece.tokens)
        # Counted only where they are told: a stream has a chunk a token.
        totals = self._totals if self._answer.running_usage else None
        chunks = []
        for delta in deltas:
            chunks.append(self._answer.piece(piece.index, delta, told, totals))
            told = None
        if piece.outcome is not None:
            chunks.append(self._answer.closing(piece.index, piece.outcome, told, totals))
        return chunks

    def close(self, fields: dict[str, Any]) -> None:
        """Ends what still runs. fields: of the request's log line."""
        self._generation.close()
        fields.update(
            completion_tokens=self._generation.usage.completion_tokens,
            finish_reason="/".join(sorted(set(self._generation.reasons))),
        )
