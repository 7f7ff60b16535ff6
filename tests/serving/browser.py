"""Debian's Chromium without a window, driven over a pair of pipes: no driver, no websocket, no further package."""

import base64
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions")


class Tab:
    """One page. asked: the addresses it requested. faults: its exceptions, failed requests, what its policy refused."""

    def __init__(self, read: int, write: int):
        self._read, self._write, self._rest, self._last, self._session = read, write, b"", 0, ""
        self.asked: list[str] = []
        self.faults: list[str] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> Any:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._last:
                assert "error" not in told, (method, told["error"])
                return told["result"]
            self._note(told.get("method"), told.get("params", {}))

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str | None, params: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.faults.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(params["entry"]["text"])

    def open(self, url: str, width: int, height: int, *, phone: bool = False) -> None:
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.do("Page.navigate", url=url)
        self.until(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.faults, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def text(self, name: str) -> str:
        return self.run(f"document.getElementById('{name}').textContent")

    def type(self, name: str, text: str) -> None:
        """Types into a field as a user does, and leaves it."""
        self.run(f"document.getElementById('{name}').focus(); document.getElementById('{name}').select()")
        self.do("Input.insertText", text=text)
        self.run("document.activeElement.blur()")

    def click(self, name: str) -> None:
        self.run(f"document.getElementById('{name}').click()")

    def picture(self, file: Path) -> None:
        """Writes a screenshot of the whole page."""
        shot = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a fresh browser; it ends with the block. profile: an empty folder for what it writes."""
    to_it, ours = os.pipe()
    theirs, from_it = os.pipe()
    # The browser wants to read descriptor 3 and to write 4, whatever numbers these pipes have here. They may be each
    # other's, so they are moved out of the way first.
    command = shlex.join((CHROMIUM, *_FLAGS, *_QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe"))
    shell = f"exec 8<&{to_it} 9>&{from_it}; exec 3<&8 4>&9 8<&- 9>&-; exec {command}"
    process = subprocess.Popen(
        ["bash", "-c", shell],
        pass_fds=(to_it, from_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(to_it)
    os.close(from_it)
    try:
        yield Tab(theirs, ours)
    finally:
        os.close(ours)
        os.close(theirs)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
