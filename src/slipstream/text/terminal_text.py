"""Makes text of models, files and other machines safe to send to a terminal.

A terminal obeys control characters: they move its cursor, change its title, or type into it.
"""

from __future__ import annotations

BROKEN = 0xFFFD  # the replacement character
PICTURES = (
    {control: 0x2400 + control for control in range(0x20) if chr(control) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], BROKEN)  # for these there are no pictures
)


def harmless(text: str) -> str:
    """A text whose control characters are pictures, such as \N{SYMBOL FOR ESCAPE}; tabs and line ends stay."""
    return text if text.isprintable() else text.translate(PICTURES)
