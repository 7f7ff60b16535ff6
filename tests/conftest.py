"""Shared fixtures. The default run is CPU-only: 8 host devices and exact float32 matmuls.

`-m gpu` or `-m rocm` keeps the machine's own accelerator. `--slow` also runs the tests marked slow.

Most of a run is XLA compiling, so a run that names no marker has LLVM optimise little, and every run keeps compiled
programs in a folder that its processes share. `--slow` and `-m parity` run what users run: fully optimised programs; so
do the files whose tests promise bits (`fully_optimised`).
"""

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh

from tests.helpers import GOLDENS, det
from vitstripe import make_mesh
from vitstripe.platform import platform_of

HOST_DEVICES = 8
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--any-device",
        action="store_true",
        help="run the tests marked gpu and rocm on host devices, to see that they run at all; nothing is measured",
    )
    parser.addoption(
        "--failed-before", action="append", default=[], help="a check that failed before pytest ran; named at the end"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.any_device or not re.search(r"(?<!not )\b(gpu|rocm)\b", config.option.markexpr):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", HOST_DEVICES)
        if not config.option.markexpr and not config.option.slow:
            set_jax(disable_most_optimizations=True)
        share_compiled_programs(config)
    jax.config.update("jax_default_matmul_precision", "highest")


def set_jax(**settings: bool | int | str) -> None:
    """Changes settings of this process and of those that it starts."""
    for name, value in settings.items():
        os.environ[f"JAX_{name.upper()}"] = str(value)
        jax.config.update(f"jax_{name}", value)


def share_compiled_programs(config: pytest.Config) -> None:
    """Keeps every compiled program on disk until the run is over, unless JAX_COMPILATION_CACHE_DIR names a folder."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        set_jax(compilation_cache_dir=folder)
    set_jax(persistent_cache_min_compile_time_secs=0, persistent_cache_min_entry_size_bytes=-1)


def pytest_collection_finish() -> None:
    # Tracing makes objects by the million. A quarter of its time goes to Python's search for unreachable ones, unless
    # that is made seldom and leaves out what was imported.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.option.slow:
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow (scripts/test --all)"))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for name in config.option.failed_before:
        terminalreporter.write_line(f"FAILED before pytest: {name}", red=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.option.any_device:
        return
    for name, kinds in (("rocm", ("rocm",)), ("gpu", ("cuda", "rocm"))):
        if item.get_closest_marker(name):
            device = platform_of(jax.devices()[0])
            if device.kind not in kinds:
                pytest.skip(f"NOT MEASURED: needs a {name.upper()} device, this run has {device.kind} ({device.name})")


@pytest.fixture(scope="module", autouse=True)
def no_guard_is_left() -> Iterator[None]:
    """A CompileGuard that nobody closes has JAX explain every trace of the tests after it, for minutes in all."""
    yield
    left = jax.config.jax_explain_cache_misses
    jax.config.update("jax_explain_cache_misses", False)
    assert not left, "a CompileGuard was not closed"


@pytest.fixture(scope="module")
def fully_optimised() -> Iterator[None]:
    """Programs as users run them, in a run that has LLVM optimise little: for what promises bits."""
    little = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "True"
    set_jax(disable_most_optimizations=False)
    yield
    set_jax(disable_most_optimizations=little)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """tests/goldens: tiny checkpoints and what the reference implementation computes from them."""
    return GOLDENS


@pytest.fixture(scope="session", name="det")
def det_fixture() -> Callable[..., object]:
    """The reference input generator, `det(shape, seed)`; also importable from tests.helpers."""
    return det


@pytest.fixture(scope="session")
def mesh_of() -> Callable[[int], Mesh]:
    """mesh_of(n): a mesh of the first n devices with one Auto axis "tp"."""
    return make_mesh


@dataclass
class Compiles:
    """count: backend compilations (disk cache hits included) since the block was entered."""

    count: int = 0


@pytest.fixture
def compile_counter() -> Callable[[], AbstractContextManager[Compiles]]:
    """`with compile_counter() as compiles: ...`, then read compiles.count."""

    @contextmanager
    def counting() -> Iterator[Compiles]:
        compiles = Compiles()

        def on_event(event: str, duration: float, **_: object) -> None:
            if event == _COMPILE_EVENT:
                compiles.count += 1

        jax.monitoring.register_event_duration_secs_listener(on_event)
        try:
            yield compiles
        finally:
            jax.monitoring.unregister_event_duration_listener(on_event)

    return counting
