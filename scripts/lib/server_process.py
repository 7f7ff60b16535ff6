"""A server in a process of its own, as scripts start it: ready, watched from outside, stopped."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 1200  # seconds on an idle machine, minutes on a crowded one
_STOP_SECONDS = 40.0
HELD = ("num_requests_running", "num_requests_waiting", "kv_pages_used", "encoder_rows_pinned")
"""Gauges that are zero on an idle server."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class ServerProcess:
    """url: of a running server. process, log: None where it was started by somebody else, or logs to the terminal."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None, log: Path | None):
        self.url, self.process, self.log = url, process, log

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Every series of /metrics, keyed by name and labels, the project's prefix taken off."""
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics")[1].splitlines() if not line.startswith("#"))
        return {re.sub(r"^vitstripe[_:]", "", name): float(value) for name, value in lines}

    def rss_mib(self) -> float:
        """Resident memory. Linux only."""
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def is_alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def log_tail(self, lines: int = 15) -> str:
        return "" if self.log is None else "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def last_words(self) -> str:
        """The end of an error's text: what the server said last, or where it is."""
        return "; what it said is above" if self.log is None else f":\n{self.log_tail()}"


@contextmanager
def serving(
    flags: Sequence[str], log: Path | None, ready_seconds: float = READY_SECONDS, *, module: str = "serving"
) -> Iterator[ServerProcess]:
    """A ready `python -m serving` with these flags, or another module that serves; its output goes to `log`, or where
    ours goes. Told to stop at the end if it still runs, and killed if it does not."""
    port = free_port()
    command = [sys.executable, "-m", module, *flags, "--port", str(port)]
    with nullcontext() if log is None else log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=None if log is None else subprocess.STDOUT)
    server = ServerProcess(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_ready(server, ready_seconds)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(server: ServerProcess, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not server.is_alive():
            raise SystemExit(f"error: the server ended before it was ready{server.last_words()}")
        try:
            if server.get("/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"error: the server was not ready after {seconds:g} s{server.last_words()}")


@contextmanager
def running_or_serving(url: str | None, flags: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    """The server at `url` that somebody else started, or else a fresh one. Raises SystemExit when nothing answers."""
    if url is None:
        print(f"$ python -m serving {' '.join(flags)}", file=sys.stderr)
        with serving(flags, log) as server:
            yield server
        return
    server = ServerProcess(url.rstrip("/").removesuffix("/v1"), None, None)
    try:
        server.get("/health")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: nothing answers at {url}: {error}") from None
    yield server


def leaks(counts: dict[str, float]) -> dict[str, float]:
    """Gauges of an idle server that are not zero and should be."""
    return {name: counts[name] for name in HELD if counts.get(name)}


def settled(server: ServerProcess, seconds: float = 15.0) -> dict[str, float]:
    """Waits until nothing is held; what still is after `seconds`."""
    deadline = time.monotonic() + seconds
    while (held := leaks(server.metrics())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held
