"""Draws docs/images/terminal.svg, the documentation's picture of a terminal.

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
COMMAND = 'slipstream generate "Repeat: the ferry leaves at nine, the bus leaves at ten." --debug'
FONT_FACES = re.compile(r"@font-face \{[^}]*\}")  # which would load fonts from the web


def terminal() -> None:
    """Run a command on a pseudo-terminal and draw what it prints."""
    from rich.console import Console
    from rich.text import Text

    output = _on_a_terminal(COMMAND)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), COMMAND))
    console.print(Text.from_ansi(output))
    svg = FONT_FACES.sub("", console.export_svg(title="slipstream", unique_id="terminal"))
    svg = svg.replace("Fira Code, monospace", "Menlo, Consolas, DejaVu Sans Mono, monospace")
    (IMAGES / "terminal.svg").write_text(svg, encoding="utf-8")


def _on_a_terminal(command: str) -> str:
    """What a command prints on a terminal. A line that was redrawn appears in its last state."""
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
    final = (line.rsplit("\r", 1)[-1] for line in lines if "tok/s" not in line)  # speeds belong in results.md only
    return "\n".join(final).strip("\n")


if __name__ == "__main__":
    terminal()
