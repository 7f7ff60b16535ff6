"""What the engine's thread tells reaches the event loop in order, with few wake-ups."""

import asyncio
import gc
import threading

from serving.api import mailbox
from serving.api.mailbox import Mailbox


def test_what_is_posted_together_wakes_the_loop_once_and_comes_in_order(monkeypatch):
    async def main() -> None:
        loop, seen, wakes = asyncio.get_running_loop(), [], []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: wakes.append(call) or wake(*call))
        box = Mailbox.of_running_loop()
        assert box is Mailbox.of_running_loop()
        for step in range(3):
            for i in range(64):
                box.post(seen.append, (step, i))
            assert len(wakes) == step + 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert seen == [(step, i) for step in range(3) for i in range(64)]

    asyncio.run(main())


def test_nothing_is_lost_while_the_loop_takes_and_threads_post():
    async def main() -> None:
        seen: list[tuple[int, int]] = []
        box = Mailbox.of_running_loop()
        threads = [
            threading.Thread(target=lambda t=t: [box.post(seen.append, (t, i)) for i in range(5000)]) for t in range(3)
        ]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(30):
            while len(seen) < 15000:
                await asyncio.sleep(0.001)
        for t in range(3):
            assert [i for thread, i in seen if thread == t] == list(range(5000))

    asyncio.run(main())


def test_a_loop_that_is_closed_does_not_disturb_who_posts():
    async def make() -> Mailbox:
        return Mailbox.of_running_loop()

    asyncio.run(make()).post(print, "nobody reads this")


def test_a_loop_that_is_over_is_forgotten():
    async def make() -> None:
        Mailbox.of_running_loop().post(print)

    gc.collect()
    before = len(mailbox._mailboxes)
    for _ in range(3):
        asyncio.run(make())
    gc.collect()
    assert len(mailbox._mailboxes) <= before
