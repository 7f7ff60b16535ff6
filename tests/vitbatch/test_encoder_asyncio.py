"""The encoder under many tasks: the documented example, and a pool that is always too small."""

import asyncio

import numpy as np
from PIL import Image

from docs.asyncio_example import drive, embed
from tests.vitbatch.pictures import encoded, noise
from vitbatch import ImageError, PoolFull

SIZES = [(64, 64), (100, 70), (37, 256), (96, 96)]


def test_many_tasks_share_calls_and_each_gets_its_own_rows(encoder_of, monkeypatch):
    encoder = encoder_of(2, (512,))
    files = [encoded(Image.fromarray(noise(*SIZES[i % 4], 60 + i)), "PNG") for i in range(12)]
    calls = []
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda images: calls.append(len(images)) or encode(images))

    async def serve():
        queue = asyncio.Queue()
        driver = asyncio.create_task(drive(encoder, queue))
        answers = await asyncio.gather(
            *(embed(encoder, queue, file) for file in [*files, b"no image"]), return_exceptions=True
        )
        driver.cancel()
        return answers

    *rows, broken = asyncio.run(serve())
    assert isinstance(broken, ImageError)
    assert sum(calls) == 12
    assert len(calls) < 12
    for file, own in zip(files, rows, strict=True):
        np.testing.assert_array_equal(own, encode([file])[0])


def test_sixteen_requests_over_a_pool_for_four_images_all_get_the_right_rows(encoder_of):
    encoder = encoder_of(2, (512,), pool_tokens=36)
    images = [encoder.processor.prepare(noise(96, 96, 80 + i)) for i in range(8)]
    want = encoder.encode(images)
    draw = np.random.default_rng(0)
    asked = [draw.choice(8, 1 + i % 4, replace=False).tolist() for i in range(16)]
    before = encoder.cache.re_encodes

    async def request(lock: asyncio.Lock, wanted: list[int]) -> None:
        for _ in range(3):
            while True:
                async with lock:  # the one thread that drives the devices
                    try:
                        found = encoder.encode_to_pool([images[i] for i in wanted])
                        rows = [np.asarray(encoder.pool)[slots] for slots in found.slots]
                        break
                    except PoolFull:
                        pass
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            for i, own in zip(wanted, rows, strict=True):
                assert np.abs(own - want[i]).max() <= 5e-6 * np.abs(want[i]).max()
            encoder.release([images[i].key for i in wanted])

    async def serve():
        lock = asyncio.Lock()
        await asyncio.gather(*(request(lock, wanted) for wanted in asked))

    asyncio.run(serve())
    assert encoder.cache.tokens_pinned == 0
    assert encoder.cache.re_encodes > before


def test_a_fault_of_the_device_reaches_every_task_and_the_next_one_is_served(encoder_of, monkeypatch):
    encoder = encoder_of(2, (512,))
    files = [encoded(Image.fromarray(noise(64, 64, seed)), "PNG") for seed in range(3)]

    def fails(images):
        raise RuntimeError("device lost")

    async def serve():
        queue = asyncio.Queue()
        driver = asyncio.create_task(drive(encoder, queue))
        with monkeypatch.context() as broken:
            broken.setattr(encoder, "encode", fails)
            failed = await asyncio.gather(*(embed(encoder, queue, file) for file in files), return_exceptions=True)
        served = await embed(encoder, queue, files[0])
        driver.cancel()
        return failed, served

    failed, served = asyncio.run(asyncio.wait_for(serve(), 60))
    assert [str(error) for error in failed] == ["device lost"] * 3
    np.testing.assert_array_equal(served, encoder.encode([files[0]])[0])
