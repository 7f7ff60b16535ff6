"""The bounded worker pool: order, places, errors and cancelling, from threads and from asyncio."""

import asyncio
import threading
import time
from functools import partial

import numpy as np
import pytest

from tests.vitbatch.pictures import noise
from vitbatch import ImageError, ImageProcessor
from vitbatch.workers import Workers, WorkersBusyError, usable_cores

SMALL = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536)
PATIENCE = 20


class Gate:
    """Work that waits until it is let through, and knows how much of it has begun."""

    def __init__(self):
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self, value: object = None) -> object:
        self.begun.release()
        assert self.open.wait(PATIENCE)
        return value

    def wait_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=PATIENCE)


def square_or_fail(value: int) -> int:
    time.sleep(0.001 * (value % 3))
    if value % 5 == 3:
        raise ImageError(f"image {value} is bad")
    return value * value


@pytest.fixture
def workers():
    with Workers(2, limit=3) as made:
        yield made


def all_places_are_free(workers: Workers) -> bool:
    gate = Gate()
    futures = [workers.submit(gate, timeout=PATIENCE) for _ in range(workers.limit)]
    with pytest.raises(WorkersBusyError):
        workers.submit(gate, timeout=0)
    gate.open.set()
    return all(future.result(PATIENCE) is None for future in futures)


def test_prepared_images_come_back_in_order_whatever_took_longest(workers):
    pictures = [noise(40 + 300 * (i % 2), 90 + i, i) for i in range(11)]
    for done, picture in zip(workers.each(SMALL.prepare, pictures), pictures, strict=True):
        want = SMALL.prepare(picture)
        assert done.result().key == want.key
        np.testing.assert_array_equal(done.result().patches, want.patches)


def test_one_images_error_stays_its_own(workers):
    outcomes = list(workers.each(SMALL.prepare, [noise(40, 50, 0), b"no image", noise(50, 40, 1)]))
    with pytest.raises(ImageError, match="cannot be decoded"):
        outcomes[1].result()
    assert [outcomes[i].result().size for i in (0, 2)] == [(40, 50), (50, 40)]
    assert all_places_are_free(workers)


def test_each_reads_no_further_ahead_than_there_are_places(workers):
    taken = []
    results = workers.each(square_or_fail, (taken.append(i) or i for i in range(0, 1000, 5)))
    assert next(results).result() == 0
    assert len(taken) <= workers.limit + 1
    results.close()
    assert all_places_are_free(workers)


def test_a_full_pool_keeps_threads_waiting_or_says_so(workers):
    gate = Gate()
    futures = [workers.submit(gate, i) for i in range(3)]
    with pytest.raises(
        WorkersBusyError, match=r"^all 3 places were taken for 0\.01 s; wait longer or send fewer at a time"
    ):
        workers.submit(gate, 3, timeout=0.01)
    later = threading.Thread(target=lambda: futures.append(workers.submit(gate, 4)))
    later.start()
    gate.open.set()
    later.join(PATIENCE)
    assert [future.result(PATIENCE) for future in futures] == [0, 1, 2, 4]
    assert all_places_are_free(workers)


def test_no_more_run_at_once_than_there_are_threads(workers):
    gate = Gate()
    futures = [workers.submit(gate) for _ in range(3)]
    gate.wait_begun(2)
    assert not gate.begun.acquire(timeout=0.05)
    gate.open.set()
    for future in futures:
        future.result(PATIENCE)


def test_map_gives_values_in_order_without_blocking_the_loop(workers):
    async def scenario():
        gate, ticks = Gate(), 0
        mapped = asyncio.ensure_future(workers.map(gate, list(range(20))))
        for _ in range(5):
            await asyncio.sleep(0.001)
            ticks += 1
        gate.open.set()
        return await mapped, ticks

    assert asyncio.run(scenario()) == (list(range(20)), 5)
    assert all_places_are_free(workers)


def test_tasks_of_many_callers_share_the_places_and_keep_their_own_errors(workers):
    async def scenario():
        runs = (workers.run(square_or_fail, value) for value in range(40))
        return await asyncio.gather(*runs, return_exceptions=True)

    for value, outcome in enumerate(asyncio.run(scenario())):
        if value % 5 == 3:
            assert isinstance(outcome, ImageError)
            assert str(outcome) == f"image {value} is bad"
        else:
            assert outcome == value * value
    assert all_places_are_free(workers)


def test_a_failure_in_map_drops_what_has_not_begun(workers):
    done = []

    def work(value: int) -> int:
        done.append(square_or_fail(value))
        return value

    async def scenario():
        with pytest.raises(ImageError, match="image 3 is bad"):
            await workers.map(work, [3, *range(0, 500, 5)])

    asyncio.run(scenario())
    assert all_places_are_free(workers)
    assert len(done) < 50


def test_a_cancelled_caller_leaves_its_place_to_the_next(workers):
    async def scenario():
        gate = Gate()
        running = [asyncio.ensure_future(workers.run(gate, i)) for i in range(3)]
        waiting = [asyncio.ensure_future(workers.run(gate, i)) for i in range(3, 6)]
        await asyncio.to_thread(gate.wait_begun, 2)
        for task in (running[2], waiting[0], waiting[1]):
            task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        return await asyncio.gather(*running, *waiting, return_exceptions=True)

    outcomes = asyncio.run(scenario())
    assert outcomes[:2] == [0, 1]
    assert outcomes[5] == 5
    assert [type(o) for o in outcomes[2:5]] == [asyncio.CancelledError] * 3
    assert all_places_are_free(workers)


def test_work_that_has_begun_holds_its_place_though_its_caller_left(workers):
    gate = Gate()

    async def scenario():
        tasks = [asyncio.ensure_future(workers.run(gate)) for _ in range(2)]
        await asyncio.to_thread(gate.wait_begun, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    queued = workers.submit(gate)
    with pytest.raises(WorkersBusyError):
        workers.submit(gate, timeout=0)
    gate.open.set()
    queued.result(PATIENCE)
    assert all_places_are_free(workers)


def test_cancelling_at_any_moment_loses_no_place(workers):
    async def scenario(seed: int):
        draw = np.random.default_rng(seed)
        tasks = [asyncio.ensure_future(workers.run(square_or_fail, i)) for i in range(30)]
        for _ in range(15):
            await asyncio.sleep(float(draw.random()) * 0.002)
            tasks[int(draw.integers(30))].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    for seed in range(10):
        asyncio.run(scenario(seed))
    assert all_places_are_free(workers)


def test_shutting_down_ends_those_who_wait():
    workers, gate, ends = Workers(1, limit=1), Gate(), []
    running = workers.submit(gate, "kept")
    gate.wait_begun(1)

    def wait():
        with pytest.raises(RuntimeError, match="the workers are shut down; make new ones"):
            workers.submit(gate)
        ends.append("refused")

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.02)
    workers.shutdown()
    waiting.join(PATIENCE)
    gate.open.set()
    assert (running.result(PATIENCE), ends) == ("kept", ["refused"])
    with pytest.raises(RuntimeError, match="the workers are shut down"):
        workers.submit(gate)


def test_sizes_default_to_the_cores_and_are_checked():
    with Workers() as workers:
        assert (workers.threads, workers.limit) == (usable_cores(), 4 * usable_cores())
    with pytest.raises(ValueError, match="4 threads and 3 places: there must be a thread, and a place for each"):
        Workers(4, limit=3)
    with pytest.raises(ValueError, match="0 threads"):
        Workers(0)


# ---- spread ----


def thirds(value: int, workers: Workers) -> list[int]:
    def part(third: int) -> int:
        if value == 3 and third == 1:
            raise ImageError(f"image {value} is bad")
        return 3 * value + third

    return workers.spread(part, range(3))


def test_more_work_than_threads_can_spread_at_once_and_ends(workers):
    outcomes = list(workers.each(lambda value: thirds(value, workers), range(40)))
    for value, outcome in enumerate(outcomes):
        if value == 3:
            with pytest.raises(ImageError, match="image 3 is bad"):
                outcome.result()
        else:
            assert outcome.result() == [3 * value, 3 * value + 1, 3 * value + 2]
    assert all_places_are_free(workers)


def test_parts_are_done_by_all_threads_and_need_no_place():
    meet = threading.Barrier(3)
    with Workers(3, limit=3) as workers:
        # The barrier opens only when all three threads are at a part at the same time.
        done = workers.submit(workers.spread, lambda part: meet.wait(PATIENCE) is not None and part, range(6))
        assert done.result(PATIENCE) == [*range(6)]
        assert all_places_are_free(workers)


def test_a_thread_of_later_work_does_the_parts_of_earlier_work_first():
    seen, both, spread, late = [], threading.Barrier(2), threading.Event(), threading.Event()

    def earlier_part(number: int) -> None:
        if number == 0:
            # Until all its other parts are somebody else's work.
            spread.set()
            assert late.wait(PATIENCE)
        seen.append(("earlier", number))

    def later_part(number: int) -> None:
        late.set()
        seen.append(("later", number))

    def earlier() -> None:
        both.wait(PATIENCE)
        workers.spread(earlier_part, range(8))

    def later() -> None:
        both.wait(PATIENCE)
        assert spread.wait(PATIENCE)
        workers.spread(later_part, range(4))

    with Workers(2) as workers:
        for done in [workers.submit(earlier), workers.submit(later)]:
            done.result(PATIENCE)
    assert seen[:7] == [("earlier", number) for number in range(1, 8)]
    assert sorted(seen[7:]) == [("earlier", 0), *(("later", number) for number in range(4))]


def test_the_error_of_a_part_comes_when_no_part_is_running_any_more(workers):
    gate, began = Gate(), threading.Event()

    def part(number: int) -> None:
        if number == 0:
            began.set()
            raise ImageError("image 0 is bad")
        gate()

    done = workers.submit(workers.spread, part, range(2))
    assert began.wait(PATIENCE)
    gate.wait_begun(1)
    assert not done.done()
    gate.open.set()
    with pytest.raises(ImageError, match="image 0 is bad"):
        done.result(PATIENCE)
    assert all_places_are_free(workers)


def test_work_that_has_begun_spreads_its_parts_after_shutdown_too():
    workers, gate = Workers(2), Gate()

    def work() -> list[int]:
        gate()
        return workers.spread(lambda part: part * part, range(5))

    done = workers.submit(work)
    gate.wait_begun(1)
    workers.shutdown()
    gate.open.set()
    assert done.result(PATIENCE) == [0, 1, 4, 9, 16]


def test_anybody_may_spread_and_nothing_is_no_work(workers):
    assert workers.spread(lambda part: -part, range(3)) == [0, -1, -2]
    assert workers.spread(square_or_fail, []) == []


def test_pictures_prepared_in_bands_by_all_threads_are_those_of_one(workers):
    processor = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=1 << 22)
    pictures = [noise(*size, 0) for size in [(1000, 900), (64, 96), (1024, 928), (700, 1211), (1500, 640)]]
    prepare = partial(processor.prepare, spread=workers.spread)
    for done, picture in zip(workers.each(prepare, pictures), pictures, strict=True):
        want = processor.prepare(picture)
        assert done.result().key == want.key
        np.testing.assert_array_equal(done.result().patches, want.patches)
