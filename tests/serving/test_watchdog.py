"""A device call that never comes back ends the process with its own exit code, after everybody was told."""

import subprocess
import sys
import textwrap
import threading
import time

from serving.exits import Exit
from serving.heartbeat import Heartbeat, Pulse, Watchdog


class Watched:
    """A watchdog over a heartbeat that the test beats, and what it did."""

    def __init__(self, limit):
        self.heart, self.pulse, self.told, self.left = Heartbeat(), "running", [], threading.Event()
        self.dog = Watchdog(
            self.heart,
            limit=limit,
            pulse=lambda: self.pulse,
            on_hang=self.told.append,
            leave=self.left.set,
            grace=0.0,
        )

    def __enter__(self):
        self.dog.start()
        return self

    def __exit__(self, *_):
        self.dog.stop()


def test_a_step_of_many_calls_may_take_longer_than_the_limit_of_one():
    with Watched(limit=0.4) as watched:
        for _ in range(16):
            watched.heart.beat("waiting for the devices")
            time.sleep(0.05)
        assert watched.told == []


def test_a_call_that_does_not_come_back_is_told_and_ends_the_process(capfd):
    with Watched(limit=0.2) as watched:
        watched.heart.beat("waiting for the devices")
        assert watched.left.wait(20)
    [detail] = watched.told
    assert "while waiting for the devices" in detail
    assert "limit of one device call is 0.2 s" in detail
    stacks = capfd.readouterr().err
    assert "Thread 0x" in stacks
    assert "test_watchdog.py" in stacks, "the stacks say where each thread is"


def test_a_process_that_was_frozen_and_goes_on_is_not_taken_for_dead():
    looks = []

    def beat_after_the_look() -> Pulse:
        looks.append(heart.age)
        heart.beat()
        return "running"

    heart, told = Heartbeat(), []
    heart._at -= 100.0
    dog = Watchdog(heart, limit=8.0, pulse=beat_after_the_look, on_hang=told.append, leave=lambda: None)
    assert "no sign of life" in dog._fault()
    heart._at -= 100.0
    dog.start()
    while len(looks) < 3:
        time.sleep(0.05)
    dog.stop()
    assert looks[1] > 100 > 8 > looks[2]
    assert told == []


def test_a_thread_that_is_gone_is_found_at_once():
    with Watched(limit=60.0) as watched:
        watched.pulse = "gone"
        assert watched.left.wait(20)
    assert watched.told == ["the engine's thread is gone"]


def test_silence_after_the_end_is_in_order():
    with Watched(limit=0.1) as watched:
        watched.pulse = "over"
        time.sleep(0.4)
        assert watched.told == []


HANGS = textwrap.dedent(
    """
    import threading
    from serving.__main__ import _watch
    from tests.serving.demo_server import DIGITS, Server
    from serving.config import EngineConfig

    server = Server(EngineConfig(tp=1, max_model_len=64, page_size=8, max_seqs=2, prefill_tokens=64))
    server.runner.decode = lambda seqs: threading.Event().wait()
    server.engine.start()
    _watch(server.engine, 1.0)
    image = server.prepare(DIGITS[0].read_bytes())
    futures = [server.ask(image, ignore_eos=True) for _ in range(3)]
    for future in futures:
        print(future.result(60)[1], flush=True)
    threading.Event().wait()
    """
)


def test_every_request_is_told_before_the_process_leaves():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == Exit.WATCHDOG, done.stderr
    assert done.stdout.count("ErrorEvent(kind='internal', message='the engine stopped')") == 3
    assert "while dispatching a decode pass" in done.stderr
    assert "Thread 0x" in done.stderr


def test_every_end_has_its_own_exit_code():
    assert len(set(Exit)) == len(Exit.__members__) == 6
    assert Exit.DRAINED == 0
