"""python -m serving: loads, warms up, says ready, serves until SIGTERM."""

import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import uvicorn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serving.api.app import create_app
from serving.chat import ChatTemplate
from serving.cli import DEMO_FOLDER, UsageError, encoder_config, engine_config, limits, parser
from serving.compile_guard import CompileGuard
from serving.config import EngineConfig
from serving.handle import EngineHandle
from serving.load import Advance, Start, has_images, load_engine
from serving.metrics import Metrics
from serving.tokenizer import Tokenizer
from vitbatch import EncoderConfig
from vitbatch.checkpoint import image_processor
from vitstripe.checkpoint import Checkpoint
from vitstripe.mesh import make_mesh
from vitstripe.platform import platform_of

console = Console(stderr=True)


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
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(name, total=None, what="")

            def advance(done: int, total: int, what: str) -> None:
                progress.update(task, completed=done, total=total, what=what)
                handle.set_detail(f"{name}: {done} of {total}")

            yield advance
        console.print(f"  {name:<18} {time.perf_counter() - began:6.1f} s", highlight=False)

    return stage


def _start(
    checkpoint: Checkpoint, config: EngineConfig, images: EncoderConfig, handle: EngineHandle, metrics: Metrics
) -> Start:
    guard = CompileGuard(metrics.compile)
    mesh = make_mesh(config.tp)
    device = platform_of(mesh.devices.flat[0])
    console.print(f"{handle.model_name} on {config.tp} x {device.name} ({device.kind})", highlight=False)
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
    )
    handle.set_engine(start.engine)
    return start


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
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # The engine and the HTTP side log one line a request; jax, orbax and absl would drown them.
    for name in ("jax", "absl", "orbax", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    jax.config.update("jax_num_cpu_devices", max(args.tp, 1))

    checkpoint = Checkpoint(DEMO_FOLDER if args.model == "demo" else args.model)
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
    metrics = Metrics()
    app = create_app(handle, tokenizer, template, processor, limits(args), metrics)
    listener = _listen(args.host, args.port)
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=max(1, int(args.drain_seconds))
        )
    )
    failures: list[str] = []

    def load() -> None:
        began = time.perf_counter()
        try:
            start = _start(checkpoint, config, images, handle, metrics)
        except Exception as error:
            failures.append(str(error) if isinstance(error, ValueError | RuntimeError) else repr(error))
            if not isinstance(error, ValueError | RuntimeError):
                logging.getLogger("serving").exception("start-up failed")
            handle.fail("start-up failed")
            server.should_exit = True
            return
        programs = start.vision_programs + start.language_programs
        console.print(
            f"ready after {time.perf_counter() - began:.1f} s, {programs} programs compiled and run on every device: "
            f"http://{args.host}:{args.port}/v1",
            highlight=False,
        )

    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn raises the signal that stopped it again at the end; the exit code must say that the end was orderly.
        signal.signal(number, lambda *_: None)
    threading.Thread(target=load, name="loader", daemon=True).start()
    server.run(sockets=[listener])
    drained = handle.drain(args.drain_seconds)
    if failures:
        raise UsageError(failures[0])
    if not drained:
        raise UsageError(f"stopped with requests still running after {args.drain_seconds:g} s")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; the exit code is 0 after an orderly end. A user's mistake is one line, not a stack trace."""
    try:
        return _serve(argv)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
