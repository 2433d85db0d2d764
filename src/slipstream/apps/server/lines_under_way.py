"""Which lines of batches are being answered, kept on the disk: what ran when a server died, the next one knows.

A line that was the only one under way then is not tried again. Of several any may have been the cause: they are
answered last and one at a time, so that a line can end a server at most twice.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from slipstream.errors import SlipstreamError

Key = tuple[str, int]  # the id of a batch, and the number of a line
Stage = Literal["begun", "over", "suspect", "fatal"]


class LinesUnderWay:
    """Lines of all batches of a folder. fatal: those that ended a server; suspects: those that may have.

    unfinished: the ids of batches that go on; what the file says of others is forgotten.
    """

    def __init__(self, path: Path, unfinished: Collection[str]) -> None:
        self._path, self._running, self._changed = path, 0, asyncio.Event()
        stages = {key: stage for key, stage in _read(path) if key[0] in unfinished}
        begun = {key for key, stage in stages.items() if stage == "begun"}
        self.fatal = {key for key, stage in stages.items() if stage == "fatal"} | (begun if len(begun) == 1 else set())
        self.suspects = {key for key, stage in stages.items() if stage == "suspect"} | (begun - self.fatal)
        self._file: int | None = self._rewritten()

    @asynccontextmanager
    async def entered(self, key: Key) -> AsyncIterator[None]:
        """While a line is worked on. A suspect waits until no other is, and no other begins meanwhile."""
        alone = key in self.suspects
        while self._running if alone else self._running < 0:
            self._changed.clear()
            await self._changed.wait()
        self._running = -1 if alone else self._running + 1
        try:
            self._note(key, "begun")
            yield
        finally:
            self._running = 0 if alone else self._running - 1
            self._changed.set()
            self._note(key, "suspect" if alone else "over")

    def acquit(self, key: Key) -> None:
        """A suspect has been answered, or refused, and the server lives."""
        self.suspects.discard(key)
        self._note(key, "over")

    def close(self, *, orderly: bool) -> None:
        """Nothing more is noted. orderly: the server was told to end, which is no line's fault."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            if orderly:
                os.close(self._rewritten())

    def _rewritten(self) -> int:
        """A new file of what is to be remembered, open for more."""
        temporary = self._path.with_suffix(".part")
        stages: list[tuple[Iterable[Key], Stage]] = [(self.fatal, "fatal"), (self.suspects, "suspect")]
        temporary.write_bytes(b"".join(_line(key, stage) for keys, stage in stages for key in sorted(keys)))
        temporary.replace(self._path)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def _note(self, key: Key, stage: Stage) -> None:
        if self._file is None:
            return
        line = _line(key, stage)
        part = os.write(self._file, line)  # outlives the process; that is enough
        if part < len(line):
            os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_END) - part)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(key: Key, stage: Stage) -> bytes:
    return json.dumps([*key, stage]).encode() + b"\n"


def _read(path: Path) -> list[tuple[Key, Stage]]:
    """What a file says, the latest last; a line that a dying process left unfinished says nothing."""
    if not path.exists():
        return []
    stages: list[tuple[Key, Stage]] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                batch, number, stage = json.loads(line)
            except (ValueError, TypeError) as error:
                raise SlipstreamError(f"{str(path)!r} is not what a server has written: {error}") from error
            stages.append(((batch, number), stage))
    return stages
