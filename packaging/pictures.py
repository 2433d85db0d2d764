"""The recorded terminal of the documentation, docs/images/terminal.svg.

    python packaging/pictures.py

docs/images/make_screenshots.py takes the pictures of the server's page.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 96
SHOWN = 'slipstream generate "Repeat: the ferry leaves at nine, the bus leaves at ten." --debug'
FACES = re.compile(r"@font-face \{[^}]*\}")  # they name addresses of fonts


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


if __name__ == "__main__":
    terminal()
