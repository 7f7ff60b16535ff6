"""One server for all clients: they are shown against the same engine, one after another."""

from collections.abc import Iterator

import pytest

from tests.serving.clients.served import Served, serve


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running
