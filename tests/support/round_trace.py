"""Counts the work that a round makes on the host: calls of our functions, moves between files, files, and depth.

The counts do not depend on the machine. Comprehensions, lambdas and the toy model itself are not counted: how many
columns a forward has depends on the shapes that agree to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import slipstream
from slipstream import Result

ROOT = str(Path(slipstream.__file__).parent) + "/"


@dataclass(frozen=True)
class Work:
    """Per round but for `files` and `depth`, which are those of the whole call."""

    calls: float
    moves: float  # from one of our files to another
    files: int  # outside models/
    depth: int  # most of our functions that wait for each other


def _is_counted(code: CodeType) -> bool:
    is_ours = code.co_filename.startswith(ROOT) and code.co_filename != ROOT + "models/toy.py"
    return is_ours and "<" not in code.co_qualname.rpartition(".")[2]


def traced(generate: Callable[[], Result]) -> Work:
    """The work of a call that returns a result."""
    files, visited, depths = set[str](), list[str](), [0]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not _is_counted(frame.f_code):
            return
        visited.append(frame.f_code.co_filename[len(ROOT) :])
        files.add(visited[-1])
        depth, above = 0, frame
        while above is not None:
            depth, above = depth + _is_counted(above.f_code), above.f_back  # type: ignore[assignment]
        depths[0] = max(depths[0], depth)

    sys.setprofile(profile)
    try:
        result = generate()
    finally:
        sys.setprofile(None)
    rounds = len(result.rounds)
    moves = sum(file != last for file, last in zip(visited, ["", *visited], strict=False))
    outside = sum(not file.startswith("models/") for file in files)
    return Work(len(visited) / rounds, moves / rounds, outside, depths[0])
