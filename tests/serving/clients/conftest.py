"""One server for all clients of a file: they are shown against the same engine, one after another."""

from collections.abc import Iterator

import pytest

from tests.serving.clients.served import Served, serve


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # No longer than a file: its guard counts whatever this process compiles.
    with serve() as running:
        yield running
