"""Pages in a browser: playwright and Debian's Chromium. Tests skip where they are absent."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import PATIENCE

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
OPTIONS += "--disable-component-update --disable-sync"
browsers = pytest.mark.skipif(
    not (CHROMIUM.exists() and importlib.util.find_spec("playwright")),
    reason=f"needs playwright and {CHROMIUM}: pip install playwright; apt-get install chromium",
)


@contextmanager
def running_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS.split(), timeout=1000 * PATIENCE)
        yield chromium
        chromium.close()


class Opened:
    """Pages of a browser. Errors of scripts and refusals of the browser fail the test."""

    def __init__(self, browser: Any) -> None:
        self.browser, self.problems, self._contexts = browser, [], []

    def __call__(self, url: str, prepare: Callable[[Any], None] = lambda page: None, **context: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"} | context
        self._contexts.append(self.browser.new_context(**options))
        page = self._contexts[-1].new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if "Policy" in message.text else None)
        prepare(page)
        page.goto(url)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def ask(page: Any, text: str = "the cat sat on the mat, the cat", **settings: Any) -> None:
    page.wait_for_selector("#served[data-up]")
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    page.fill("#ask", text)
    page.keyboard.press("Enter")


def canned(texts: list[str], split: Callable[[str], Any] = list, **details: Any) -> Callable[[Any], None]:
    """Answers of a fake server, one per request, each in a single round. details: of every token."""
    texts_left = iter(texts)

    def answer(route: Any) -> None:
        text = next(texts_left)
        tokens = [{"id": 1, "text": token, "origin": "plain", "source": None} | details for token in split(text)]
        seconds = {"draft": 0.001, "verify": 0.002}
        facts = {"index": 0, "drafted": 0, "accepted": 0, "rejected": [], "source": None, "seconds": seconds}
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
        chunk = {"choices": [choice], "slipstream": {"tokens": tokens, "round": facts}}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    return lambda page: page.route("**/v1/chat/completions", answer)
