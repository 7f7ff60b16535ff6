"""What becomes of an answer when its reader is slow, its engine dies, or the engine goes on after a stop string."""

import asyncio
from collections.abc import Callable

import pytest

from serving.api.choice import Order, Piece
from serving.api.errors import ApiError
from serving.api.generation import Generation
from serving.api.limits import Limits
from serving.metrics import Metrics
from serving.protocol import Event, FinishEvent, SamplingParams, Submission, TokenEvent, Usage
from serving.stream import AnswerStream, TextOptions
from tests.serving.api.harness import LETTER_A, TOKENIZER, FakeEngine


class Engine(FakeEngine):
    """Tells what the test lets it tell."""

    tell: Callable[[Event], None]

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> None:
        self.tell = on_event


async def begun(engine: Engine, stop: tuple[str, ...] = (), **limits: float) -> Generation:
    order = Order(Submission("a", [1, 2], (), SamplingParams(max_tokens=9)), AnswerStream(TOKENIZER, TextOptions(stop)))
    generation = Generation(
        engine,
        [order],
        limits=Limits(**limits),  # pyright: ignore[reportArgumentType]
        metrics=Metrics(),
        trace_id="t",
        arrived=0.0,
    )
    first = asyncio.ensure_future(generation.begin())
    await asyncio.sleep(0)
    engine.tell(TokenEvent(LETTER_A))
    await first
    return generation


async def read(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation.pieces()]


def text_of(pieces: list[Piece]) -> str:
    return "".join(delta.text for piece in pieces for delta in piece.deltas if hasattr(delta, "text"))


def test_a_complete_answer_reaches_a_slow_reader_though_the_engine_is_dead_by_then():
    async def main() -> None:
        engine, pieces = Engine(), []
        generation = await begun(engine, watch_seconds=0.02)
        async for piece in generation.pieces():
            pieces.append(piece)
            if len(pieces) == 1:
                await asyncio.sleep(0.1)  # the reader takes its time, and the engine is looked at meanwhile
                for _ in range(3):
                    engine.tell(TokenEvent(LETTER_A))
                engine.tell(FinishEvent("length", Usage(2, 4, 0, 0), ()))
                await asyncio.sleep(0.01)
                engine.state = "dead"
        generation.close()
        assert text_of(pieces) == "aaaa"
        assert pieces[-1].outcome is not None
        assert pieces[-1].outcome.reason == "length"

    asyncio.run(main())


def test_an_answer_that_can_no_longer_end_fails_soon_after_the_engine_died():
    async def main() -> None:
        engine = Engine()
        generation = await begun(engine, watch_seconds=0.02)
        engine.state = "dead"
        with pytest.raises(ApiError, match="the engine stopped before the answer was done"):
            await asyncio.wait_for(read(generation), 10)
        generation.close()

    asyncio.run(main())


def test_after_a_stop_string_the_engine_is_told_once_and_waited_for_no_longer_than_promised():
    async def main() -> None:
        engine = Engine()
        generation = await begun(engine, stop=("aaa",), abort_seconds=0.1)
        reading = asyncio.ensure_future(read(generation))
        async with asyncio.timeout(10):
            while not reading.done():  # an engine that does not listen
                engine.tell(TokenEvent(LETTER_A))
                await asyncio.sleep(0.005)
        generation.close()
        assert len(engine.aborted) in (1, 2), "once for the stop string, once when the answer is closed"
        outcome = (await reading)[-1].outcome
        assert outcome is not None
        assert outcome.matched == "aaa"

    asyncio.run(main())
