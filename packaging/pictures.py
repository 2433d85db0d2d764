"""Pictures of the documentation: a recorded terminal, and the built site on a desktop, on a phone and in the dark.

    python packaging/pictures.py terminal           # docs/images/terminal.svg
    make docs && python packaging/pictures.py site  # docs/images/site-*.png, by Chromium through Playwright

docs/images/make_screenshots.py takes those of the server's page and of a report.
"""

from __future__ import annotations

import functools
import http.server
import io
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 96
SHOWN = 'slipstream generate "Repeat: the ferry leaves at nine, the bus leaves at ten." --debug'
FACES = re.compile(r"@font-face \{[^}]*\}")  # they name addresses of fonts
SCREENS = {  # file: page, width, height, colors
    "site-desktop": ("index.html", 1280, 860, "light"),
    "site-dark": ("drafters.html", 1280, 860, "dark"),
    "site-phone": ("start.html", 390, 844, "light"),
}


def terminal() -> None:
    """Run a command on a pseudo-terminal and draw what it prints."""
    from rich.console import Console
    from rich.text import Text

    printed = _on_a_terminal(SHOWN)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), SHOWN))
    console.print(Text.from_ansi(printed))
    drawn = FACES.sub("", console.export_svg(title="slipstream", unique_id="terminal"))
    drawn = drawn.replace("Fira Code, monospace", "Menlo, Consolas, DejaVu Sans Mono, monospace")
    (IMAGES / "terminal.svg").write_text(drawn, encoding="utf-8")


def _on_a_terminal(command: str) -> str:
    """What a command prints that sees a terminal; of lines that were drawn over, the last state."""
    import os
    import pty
    import shlex

    main, side = pty.openpty()
    words = [sys.executable, "-c", "from slipstream.apps.cli import main; main()", *shlex.split(command)[1:]]
    settings = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, env=settings, close_fds=True)
    os.close(side)
    pieces = []
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        pieces.append(piece)
    if process.wait() != 0:
        raise SystemExit(f"{command!r} ended with {process.returncode}")
    lines = b"".join(pieces).decode().replace("\r\n", "\n").split("\n")
    shown = (line.rsplit("\r", 1)[-1] for line in lines if "tok/s" not in line)  # speeds belong to results.md alone
    return "\n".join(shown).strip("\n")


def site() -> None:
    """Photograph pages of the built site; no page may ask another address for anything."""
    from playwright.sync_api import sync_playwright

    served = functools.partial(http.server.SimpleHTTPRequestHandler, directory=ROOT / "site")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, (page_name, width, height, colors) in SCREENS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colors)  # type: ignore[arg-type]
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.goto(address + page_name)
            page.wait_for_timeout(300)
            if foreign := [url for url in asked if not url.startswith((address, "data:", "blob:"))]:
                raise SystemExit(f"{page_name} asks for {foreign[0]}")
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["terminal"]:
        {"terminal": terminal, "site": site}[wanted]()
