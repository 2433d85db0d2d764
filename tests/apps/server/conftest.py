"""A browser for the tests of a module, and pages in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.page_browser import CHROMIUM, OPTIONS, Opened


@pytest.fixture(scope="module")  # while it runs, no other test of the process can run an event loop
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        one = started.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS.split())
        yield one
        one.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    one = Opened(browser)
    yield one
    one.close()
    assert one.problems == []
