"""A server and a browser per test module, and pages in the browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.page_browser import CHROMIUM, OPTIONS, Opened
from tests.support.running_server import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")  # while it runs, no other test of this process can run an event loop
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS.split())
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    pages = Opened(browser)
    yield pages
    pages.close()
    assert pages.problems == []
