"""Markdown is rendered while it streams: finished blocks stay, and nothing is lost."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from slipstream.apps.chat.markdown_stream import MarkdownStream, finished_blocks

ANSWER = """Here is a **bold** word and a list:

- heron
- sparrow

```python
def add(a, b):

    return a + b
```

The end."""


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("no blank line", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\n```\n\nb", "```\na\n\n```\n\n"),
        ("~~~\n```\n\n~~~\n", ""),
    ],
)
def test_blocks_end_at_blank_lines_outside_of_code(text: str, finished: str) -> None:
    assert text[: finished_blocks(text)] == finished


def left_on_screen(written: str) -> str:
    """What a terminal shows in the end, after lines were cleared and rewritten."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return "\n".join(line.rstrip() for line in lines).rstrip()


def shown(size: int, *, width: int = 60) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    stream = MarkdownStream(console)
    for start in range(0, len(ANSWER), size):
        stream.write(ANSWER[start : start + size])
    stream.end()
    return left_on_screen(screen.getvalue())


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_final_screen_does_not_depend_on_the_size_of_the_pieces(size: int) -> None:
    text = shown(size)
    assert "**" not in text and "```" not in text and "Here is a bold word" in text
    assert "• heron" in text and "def add(a, b):" in text and "return a + b" in text and "The end." in text
    assert re.sub(r"\n\n+", "\n", text) == re.sub(r"\n\n+", "\n", shown(1000))


def test_long_lines_are_broken_at_words() -> None:
    words = set(ANSWER.replace("*", "").replace("```", "").split())
    assert {word for word in shown(1000, width=24).split() if word not in "•-"} <= words


def test_a_preview_is_erased_before_its_block_is_printed() -> None:
    screen = io.StringIO()
    stream = MarkdownStream(Console(file=screen, width=60, height=10, force_terminal=True, color_system=None))
    stream.write("a **b")
    stream.write("** c\n\nnext")
    stream.end()
    text = screen.getvalue()
    assert "a b c" in text and "next" in text and "\x1b[2K" in text
