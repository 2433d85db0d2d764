"""Server-sent events, read by the standard (HTML, section 9.2.6) from bytes in pieces of any size."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class ServerEvent:
    """One event. kind: "message" where none is named."""

    kind: str
    data: str


def events_of(pieces: Iterable[bytes]) -> Iterator[ServerEvent]:
    """The events of a stream as they come; one that the stream ends in counts, as servers leave out the empty line."""
    kind, data = "", list[str]()
    for line in _lines(pieces):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif not line:
            if data:
                yield ServerEvent(kind or "message", "\n".join(data))
            kind, data = "", []
    if data:
        yield ServerEvent(kind or "message", "\n".join(data))


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of UTF-8 text, without the mark that it may begin with."""
    decoder, rest, after_return = getincrementaldecoder("utf-8-sig")("replace"), "", False
    for piece in pieces:
        text = decoder.decode(piece)
        if not text:
            continue
        # a carriage return ends its line at once, for what follows may take long; a line feed behind it is a part of it
        rest += text[1:] if after_return and text[0] == "\n" else text
        after_return = text[-1] == "\r"
        *lines, rest = LINE_END.split(rest)
        yield from lines
    if rest:
        yield rest
