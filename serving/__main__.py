"""python -m serving: loads, warms up, says ready, serves until SIGTERM."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

import jax
import uvicorn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serving import doctor, logs
from serving.api.app import create_app
from serving.api.fetch import Fetcher
from serving.api.listen import server_config
from serving.chat import ChatTemplate, choose_parsers
from serving.cli import (
    UsageError,
    arguments,
    encoder_config,
    engine_config,
    image_hosts,
    keys,
    limits,
    model_folder,
    profiler,
)
from serving.config import EngineConfig
from serving.engine import Engine
from serving.exits import Exit
from serving.handle import EngineHandle
from serving.heartbeat import Watchdog
from serving.load import Advance, Start, has_images, load_engine
from serving.metrics import Metrics
from serving.tokenizer import Tokenizer
from vitbatch import CompileGuard, EncoderConfig
from vitbatch.checkpoint import image_processor
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh
from vitstripe.platform import platform_of
from vitstripe.selftest import CollectiveHang

console = Console(stderr=True)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
# The engine's thread lets the interpreter go dozens of times a step, at calls into the devices above all, and has it
# back after this long while another thread wants it, too. Python's own 5 ms made a decode step of 12 ms one of 288
# beside a busy thread (H200).
_SWITCH_SECONDS = 2e-5


def _say(text: str) -> None:
    """To who watches the start; where nobody does, as a line of the log like every other."""
    if console.is_terminal:
        console.print(text, highlight=False, soft_wrap=True)
    else:
        logging.getLogger("serving").info("%s", " ".join(text.split()))


def _bars(handle: EngineHandle):
    """Opens one progress bar a stage, and tells /ready what is going on."""

    @contextmanager
    def stage(name: str) -> Iterator[Advance]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn() if "programs" in name else TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
        )
        handle.set_detail(name)
        began = time.perf_counter()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(name, total=None, what="")

            def advance(done: int, total: int, what: str) -> None:
                progress.update(task, completed=done, total=total, what=what)
                handle.set_detail(f"{name}: {done} of {total}")

            yield advance
        _say(f"  {name:<18} {time.perf_counter() - began:6.1f} s")

    return stage


def _memory(device: jax.Device) -> Mapping[str, int]:
    return device.memory_stats() or {}


def _start(
    checkpoint: Checkpoint,
    config: EngineConfig,
    images: EncoderConfig,
    handle: EngineHandle,
    metrics: Metrics,
    on_death: Callable[[str], None],
) -> Start:
    guard = CompileGuard(metrics.compile)
    mesh = make_mesh(config.tp)
    device = platform_of(mesh.devices.flat[0])
    for one in mesh.devices.flat:
        if one.memory_stats():  # a CPU has none
            metrics.watch_memory(str(one.id), partial(_memory, one))
    _say(f"{handle.model_name} on {config.tp} x {device.name} ({device.kind})")
    for finding in doctor.find_here():
        if finding.level != "note":
            logging.getLogger("serving").warning("%s: %s", finding.level, finding.text)
    doctor.check_collective(mesh)
    start = load_engine(
        checkpoint,
        mesh,
        config,
        images,
        model_name=handle.model_name,
        eos_ids=handle.eos_ids,
        metrics=metrics,
        guard=guard,
        stage=_bars(handle),
        on_death=on_death,
    )
    handle.set_engine(start.engine)
    _watch(start.engine, config.step_seconds)
    return start


def _watch(engine: Engine, limit: float) -> None:
    """Ends the process when a device call does not come back."""

    def tell(detail: str) -> None:
        print(f"error: {detail}", file=sys.stderr, flush=True)
        engine.stop(detail)

    def leave() -> None:
        os._exit(Exit.WATCHDOG)

    Watchdog(engine.heartbeat, limit=limit, pulse=engine.pulse, on_hang=tell, leave=leave).start()


class _Server(uvicorn.Server):
    """Lets the engine finish before it stops to listen, so that /ready says 503 and a new request is told why.

    on_stop: called in a thread, waits for the engine and returns how many requests it had to cut. cut: that number.
    hurried: a second signal came while it waited.
    """

    on_stop: Callable[[], int] = staticmethod(lambda: 0)
    cut = 0
    hurried = False
    _stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second one ends at once."""
        if self._stopping:
            self.hurried = self.hurried or not self.should_exit
            self.force_exit = self.should_exit = True
        self._stopping = True
        threading.Thread(target=self._stop, name="drain", daemon=True).start()

    def _stop(self) -> None:
        self.cut = self.on_stop()
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """Binds before anything slow happens, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


def _serve(argv: Sequence[str] | None) -> int:
    if list(sys.argv[1:] if argv is None else argv) == ["doctor"]:
        return doctor.main()
    args = arguments(sys.argv[1:] if argv is None else argv)
    logs.to_stderr()
    sys.setswitchinterval(_SWITCH_SECONDS)
    jax.config.update("jax_num_cpu_devices", max(args.tp, 1))
    if prepared := doctor.prepare_environment(os.environ):
        logging.getLogger("serving").warning(prepared)

    checkpoint = Checkpoint(model_folder(args.model))
    config, images = engine_config(args, checkpoint.config), encoder_config(args)
    tokenizer = Tokenizer.from_checkpoint(checkpoint.folder)
    template_file = any((checkpoint.folder / f).is_file() for f in ("chat_template.jinja", "tokenizer_config.json"))
    template = ChatTemplate.from_checkpoint(checkpoint.folder) if template_file else None
    processor = image_processor(checkpoint, images) if has_images(checkpoint) else None
    handle = EngineHandle(
        model_name=args.served_model_name or checkpoint.folder.name,
        max_model_len=config.max_model_len,
        eos_ids=tokenizer.eos_ids,
    )
    access = keys(args, os.environ)
    if not access.api and args.host not in _LOOPBACK:
        logging.getLogger("serving").warning("%s is reached from other machines and no API key is set", args.host)
    metrics = Metrics(handle.model_name)
    bounds, hosts = limits(args), image_hosts(args)
    fetcher = None if hosts is None else Fetcher(hosts, max_bytes=bounds.max_image_bytes, observe=metrics.image_fetch)
    app = create_app(
        handle,
        tokenizer,
        template,
        processor,
        bounds,
        metrics,
        fetcher=fetcher,
        parsers=choose_parsers(template, checkpoint.config, tools=args.tool_parser, reasoning=args.reasoning_parser),
        keys=access,
        profiler=profiler(args, handle.between_steps),
        page=args.page,
    )
    listener = _listen(args.host, args.port)
    server = _Server(server_config(app, bounds))
    server.on_stop = lambda: handle.drain(args.drain_seconds)
    failures: list[str] = []
    codes: list[Exit] = []
    hung = threading.Event()

    def fail(detail: str, code: Exit = Exit.FAILED) -> None:
        failures.append(detail)
        codes.append(code)
        handle.fail(detail)
        server.should_exit = True

    def load() -> None:
        began = time.perf_counter()
        lost = partial(fail, code=Exit.DEVICE_LOST)
        try:
            start = _start(checkpoint, config, images, handle, metrics, lost)
        except CollectiveHang as error:
            hung.set()
            return lost(str(error))
        except (ValueError, RuntimeError) as error:
            return fail(str(error))
        except Exception as error:
            logging.getLogger("serving").exception("start-up failed")
            return fail(repr(error))
        programs = start.vision_programs + start.language_programs
        _say(
            f"ready after {time.perf_counter() - began:.1f} s, {programs} programs compiled and run on every device: "
            f"http://{args.host}:{listener.getsockname()[1]}/v1"
        )
        return None

    loader = threading.Thread(target=load, name="loader", daemon=True)
    loader.start()
    server.run(sockets=[listener])
    if server.cut:
        failures.append(f"{server.cut} request(s) were still running after {args.drain_seconds:g} s and were ended")
        codes.append(Exit.DRAIN_TIMED_OUT)
    elif server.hurried:  # by now the engine may be at rest: what ran was ended with its connection
        failures.append("a second signal ended the server before its requests were done")
        codes.append(Exit.DRAIN_TIMED_OUT)
    code = codes[0] if codes else Exit.DRAINED
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if loader.is_alive() or handle.is_computing() or hung.is_set():
        # A thread inside XLA cannot be stopped, and the interpreter must not take itself down around it.
        sys.stderr.flush()
        os._exit(code)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server and returns an Exit. A user's mistake is one line, not a stack trace."""
    try:
        return _serve(argv)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.USAGE


if __name__ == "__main__":
    sys.exit(main())
