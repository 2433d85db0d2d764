"""Uploads as forms (multipart/form-data), written to a file as they arrive, whatever their size."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message
from pathlib import Path
from typing import BinaryIO

from slipstream.apps.server.batch_records import LONGEST_NAME
from slipstream.apps.server.error_objects import refused

LONGEST_HEAD = 8 << 10  # bytes of a part's headers
LONGEST_FIELD = 1 << 10  # bytes of a field that is no file
MOST_PARTS = 16
CHARSETS = ("utf-8", "iso-8859-1", "us-ascii")  # of `filename*`; Python knows others, which are no character sets


class UploadForm:
    """Reads a form with one file. fields: the other parts; filename: as the client calls it."""

    def __init__(self, content_type: str, destination: Path) -> None:
        head = Message()
        head["content-type"] = content_type
        boundary = head.get_param("boundary")
        if (
            head.get_content_type() != "multipart/form-data"
            or not isinstance(boundary, str)
            or not 0 < len(boundary) <= 200
        ):
            raise refused("the request body; allowed: a form (multipart/form-data) with file and purpose", "file")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._between = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._destination = destination
        self._buffer = b"\r\n"  # so that the first boundary looks like the others
        self._name: str | None = None  # of the part under way
        self._parts = 0
        self._ended = False

    async def read(self, body: AsyncIterator[bytes]) -> None:
        """Take the whole body in; ApiError if it is no such form."""
        with open(self._destination, "wb") as file:
            async for piece in body:
                if not self._ended:  # what stands behind the last boundary means nothing
                    self._buffer += piece
                    while self._advance(file):
                        pass
        if not self._ended:
            raise refused("the form ends before its last boundary", "file")
        if self.filename is None:
            raise refused("the form has no file; allowed: a part named 'file'", "file")

    def _advance(self, file: BinaryIO) -> bool:
        """Take what stands before the next boundary, and begin the part behind it; False if more is needed."""
        data, at = self._buffer, self._buffer.find(self._between)
        if at < 0:
            cut = max(0, len(data) - len(self._between) + 1)
            self._put(file, data[:cut])
            self._buffer = data[cut:]
            return False
        head = at + len(self._between)
        end = data.find(b"\r\n\r\n", head)
        if data.startswith(b"--", head):
            self._put(file, data[:at])
            self._ended, self._buffer = True, b""
            return False
        if end < 0:
            if len(data) > head + LONGEST_HEAD:
                raise refused("a part of the form has too long headers", "file")
            return False
        self._put(file, data[:at])
        self._begin(data[head:end])
        self._buffer = data[end + 4 :]
        return True

    def _begin(self, head: bytes) -> None:
        message = Message()
        for line in head.decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.lower() == "content-disposition":
                message["content-disposition"] = value.strip()
        found = message.get_param("name", header="content-disposition")
        self._name, self._parts = str(found), self._parts + 1
        if not isinstance(found, str) or self._parts > MOST_PARTS or found in self.fields:
            raise refused("the form; allowed: one file, purpose, and few other fields, each with a name of its own")
        if found == "file":
            if self.filename is not None:
                raise refused("the form has two files; allowed: one", "file")
            self.filename = _filename(message)
        else:
            self.fields[found] = ""

    def _put(self, file: BinaryIO, data: bytes) -> None:
        if self._name == "file":
            file.write(data)
            self.size += len(data)
        elif self._name is not None and data:
            self.fields[self._name] += data.decode("utf-8", "replace")
            if len(self.fields[self._name]) > LONGEST_FIELD:
                raise refused(f"{self._name:.40} is too long; allowed: {LONGEST_FIELD} bytes", self._name[:40])


def _filename(message: Message) -> str:
    """The name of a part's file; ApiError for one in a character set that forms do not have."""
    name = message.get_param("filename", "", header="content-disposition")
    if isinstance(name, tuple):  # `filename*`, RFC 8187: character set, language, bytes as Latin-1
        charset = str(name[0] or CHARSETS[0]).lower()
        if charset not in CHARSETS:
            raise refused(f"filename* in {charset!r:.40}; allowed: {', '.join(CHARSETS)}", "file")
        name = str(name[2]).encode("latin-1", "replace").decode(charset, "replace")
    return name[:LONGEST_NAME] or "file"
