"""A server per test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.running_server import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running
