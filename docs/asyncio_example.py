"""The library in somebody else's asyncio loop: many tasks submit images, each gets its rows, one call on the device."""

import asyncio

from vitbatch import VisionEncoder


async def drive(encoder: VisionEncoder, queue: asyncio.Queue) -> None:
    """The one task that uses the device: encodes all that waits in one call, for ever."""
    while True:
        waiting = [await queue.get()] + [queue.get_nowait() for _ in range(queue.qsize())]
        try:
            rows = await asyncio.to_thread(encoder.encode, [image for image, _ in waiting])
        except Exception as error:
            rows = [error] * len(waiting)
        for (_, answer), own in zip(waiting, rows, strict=True):
            if not answer.done():
                (answer.set_exception if isinstance(own, Exception) else answer.set_result)(own)


async def embed(encoder: VisionEncoder, queue: asyncio.Queue, file: bytes):
    """Rows of one image. One that cannot be used raises vitbatch.ImageError here, in its own task."""
    image = await asyncio.to_thread(encoder.processor.prepare, file)
    encoder.check(image)
    answer = asyncio.get_running_loop().create_future()
    queue.put_nowait((image, answer))
    return await answer
