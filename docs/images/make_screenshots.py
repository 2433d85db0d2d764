"""Takes screenshots of the server's page and of a benchmark's report, for the documentation or to look at them.

    python docs/images/make_screenshots.py --runs FOLDER                        # for the documentation
    python docs/images/make_screenshots.py --all /tmp/pictures                  # every state of the page
    python docs/images/make_screenshots.py --all /tmp/pictures --runs FOLDER    # and of a report

Needs playwright (`pip install playwright`) and a Chromium, by default the one on PATH. The script starts a server on a
free port, and stops it for the pictures of a lost connection. --runs is a folder that `slipstream bench --report` has
written.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
PATIENCE_MS = 600_000  # for an answer on a slow machine
CODE = "Write a Python function that returns the n-th Fibonacci number, and explain it in a short list."
LIST = "Repeat this list twice: heron, kingfisher, wagtail, dipper, osprey, bittern, grebe."
IN_DOCS = ("server-chat", "server-race", "server-phone-tokens", "report")


class Pictures:
    """Opens pages in a browser and saves their pictures in a folder. names: pictures to save, None for all."""

    def __init__(self, browser: Any, folder: Path, names: tuple[str, ...] | None) -> None:
        self.browser, self.folder, self.names = browser, folder, names

    def open(self, url: str, *, dark: bool = False, phone: bool = False, fragment: str = "") -> Any:
        scheme = "dark" if dark else "light"
        size = {"viewport": PHONE, "has_touch": True} if phone else {"viewport": DESKTOP}
        page = self.browser.new_context(color_scheme=scheme, reduced_motion="reduce", **size).new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(url + fragment)
        return page

    def take(self, page: Any, name: str) -> None:
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > page.viewport_size["width"]:
            raise SystemExit(f"{name}: the page is {width} pixels wide, the window {page.viewport_size['width']}")
        if self.names is None or name in self.names:
            page.screenshot(path=self.folder / f"{name}.png")
            reduce_colors(self.folder / f"{name}.png")
            print(self.folder / f"{name}.png", f"{(self.folder / f'{name}.png').stat().st_size // 1024} kB")


def reduce_colors(file: Path) -> None:
    """Reduce a picture to 256 colors, if Pillow is installed."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(file) as picture:
        reduced = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(file, optimize=True)


@contextmanager
def served(target: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Run a server; yields its address once it answers, and a function that ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = "from slipstream.apps.cli import main; main()"
    arguments = ["serve", "--target", target, "--port", str(port), "--max-batch-size", "4"]
    process = subprocess.Popen([sys.executable, "-c", command, *arguments])

    def end() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()

    try:
        url = f"http://127.0.0.1:{port}/"
        while not _answers(url):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}")
            time.sleep(0.5)
        yield url, end
    finally:
        end()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(page: Any, text: str, max_tokens: int = 180, *, wait: bool = True) -> None:
    """Send a message at temperature 0. wait: until the answer is complete."""
    page.wait_for_selector("#served[data-up]")
    page.evaluate("document.getElementById('options').open = true")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", str(max_tokens))
    if page.viewport_size["width"] < 700:
        page.evaluate("document.getElementById('options').open = false")
    page.fill("#ask", text)
    page.press("#ask", "Enter")
    if wait:
        page.wait_for_selector(".message:last-child .receipt")


def pictures_of_the_page(pictures: Pictures, target: str) -> None:
    """Take every state of the page; the last ones are without the server."""
    with served(target) as (url, end):
        page = pictures.open(url)
        page.wait_for_selector("#served[data-up]")
        pictures.take(page, "server-empty")
        ask(page, CODE, wait=False)
        page.wait_for_selector(".ticker .round:nth-child(12)")
        pictures.take(page, "server-streaming")
        page.wait_for_selector(".receipt")
        page.evaluate("scrollTo(0, 0)")
        pictures.take(page, "server-chat")
        page.click('text="Tokens"')
        page.evaluate("scrollTo(0, 0)")
        pictures.take(page, "server-tokens")
        page.click(".receipt summary")
        page.click("text=Replay plainly")
        page.wait_for_selector(".receipt .seal")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        pictures.take(page, "server-receipt")
        page.fill("#max_tokens", "999999")
        page.fill("#ask", "Tell me everything.")
        page.press("#ask", "Enter")
        page.wait_for_selector(".message .problem")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        pictures.take(page, "server-error")

        race = pictures.open(url, dark=True, fragment="#race")
        race.wait_for_selector("#served[data-up]")
        race.fill("#temperature", "0")
        race.fill("#max_tokens", "120")
        race.click("#race-go")
        race.wait_for_selector("#verdict .seal")
        pictures.take(race, "server-race")

        phone = pictures.open(url, phone=True)
        phone.wait_for_selector("#served[data-up]")
        pictures.take(phone, "server-phone-empty")
        ask(phone, LIST, 90)
        phone.evaluate("scrollTo(0, 0)")
        pictures.take(phone, "server-phone")
        phone.click('text="Tokens"')
        phone.evaluate("scrollTo(0, 0)")
        pictures.take(phone, "server-phone-tokens")

        engine = pictures.open(url, dark=True, fragment="#engine")
        for text in (CODE, LIST, "Tell a story about a heron."):
            ask(pictures.open(url), text, 200, wait=False)
        engine.wait_for_selector("#engine .rows .meter")
        engine.wait_for_timeout(6000)
        pictures.take(engine, "server-engine")

        page.fill("#ask", "Are you still there?")
        end()
        page.wait_for_selector("#lost:visible")
        page.press("#ask", "Enter")
        pictures.take(page, "server-gone")
        phone.wait_for_selector("#lost:visible")
        pictures.take(phone, "server-phone-gone")


def pictures_of_the_report(pictures: Pictures, runs: Path) -> None:
    """Take the top of report.html, on a desktop and on a phone, and its texts."""
    url = (runs / "report.html").resolve().as_uri()
    pictures.take(pictures.open(url), "report")
    pictures.take(pictures.open(url, phone=True), "report-phone")
    dark = pictures.open(url, dark=True)
    dark.locator("h2", has_text="Texts").scroll_into_view_if_needed()
    dark.evaluate("[...document.querySelectorAll('h2')].find(e => e.textContent === 'Texts').scrollIntoView()")
    pictures.take(dark, "report-texts")


def main() -> None:
    """Take the pictures that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="model of the server (default: %(default)s)")
    parser.add_argument("--runs", type=Path, help="folder with report.html (default: no picture of a report)")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="save every state, in this folder")
    browsers = ("chromium", "google-chrome", "chromium-browser")
    on_path = next(filter(None, map(shutil.which, browsers)), None)
    parser.add_argument("--browser", default=on_path, help="program of a Chromium (default: %(default)s)")
    options = parser.parse_args()
    if options.browser is None:
        parser.error("no Chromium on PATH; install one, or name it with --browser")
    from playwright.sync_api import sync_playwright

    folder = options.all or HERE
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox", "--disable-gpu"])
        pictures = Pictures(browser, folder, None if options.all else IN_DOCS)
        pictures_of_the_page(pictures, options.target)
        if options.runs is not None:
            pictures_of_the_report(pictures, options.runs)
        browser.close()


if __name__ == "__main__":
    main()
