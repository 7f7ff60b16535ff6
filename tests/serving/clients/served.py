"""The embedded digit reader behind a real socket, in this process, for clients that are programs of their own."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import uvicorn

from serving.api import Limits, create_app
from serving.api.listen import server_config
from serving.chat import ChatTemplate
from serving.cli import DIGITS_FOLDER
from serving.config import EngineConfig
from tests.serving import demo_server
from tests.serving.demo_server import Server

CONFIG = replace(demo_server.CONFIG, max_queue=128)
MODEL = "digits"


@dataclass(frozen=True)
class Served:
    """url ends in /v1. server: the engine and what belongs to it. excused: programs compiled by a test itself."""

    url: str
    server: Server
    excused: list[int] = field(default_factory=list)

    @property
    def engine(self):
        return self.server.engine

    @property
    def compiles(self) -> int:
        """Programs that the server compiled after it was ready."""
        return self.server.guard.after_ready - sum(self.excused)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """What is compiled here belongs to the test; the server must be idle."""
        before = self.server.guard.after_ready
        yield
        self.excused.append(self.server.guard.after_ready - before)


@contextmanager
def serve(config: EngineConfig = CONFIG) -> Iterator[Served]:
    """Serves until the block is left; then nothing may run, be held or have been compiled."""
    server = Server(config)
    app = create_app(
        server.engine,
        server.tokenizer,
        ChatTemplate.from_checkpoint(DIGITS_FOLDER),
        server.runner.encoder.processor,
        Limits(),
        server.metrics,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    settings = server_config(app, Limits())
    settings.loop = "asyncio"  # the one whose transports are what the annotations say
    http = uvicorn.Server(settings)
    server.engine.start()
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, name="http")
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive(), "the HTTP server ended at once"
            time.sleep(0.01)
        running = Served(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", server)
        yield running
        assert server.close(), "the engine did not drain"
        assert server.idle(), "a page, a seat or a pool row leaked"
        assert running.compiles == 0, "something compiled after ready"
    finally:
        http.should_exit = True
        thread.join(20)
        listener.close()
