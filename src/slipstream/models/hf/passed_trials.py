"""Which trials a model has passed on this machine, so that a process that loads it again need not make them.

Models are tried when they are loaded, which takes a second for a billion weights. The same files, read by the same
versions of everything, pass again. A trial that failed is made again at every load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import slipstream.models
from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.block_linear import arithmetic_of
from slipstream.models.cpu.processor import processor
from slipstream.models.loaded import LoadOptions

log = logging.getLogger("slipstream")

PARTS, PART_BYTES = 16, 1024  # of a file, by which it is known


class PassedTrials:
    """Trials by name. identity: of all that they depend on; None if that is not known, and nothing outlasts this."""

    def __init__(self, identity: str | None = None) -> None:
        self._identity = identity
        self._passed = set[str]() if identity is None else _read(identity)

    def __contains__(self, name: str) -> bool:
        """Whether a model has passed this trial before."""
        return name in self._passed

    def add(self, name: str) -> None:
        """Note that a model passes a trial."""
        if name not in self._passed:
            self._passed.add(name)
            if self._identity is not None:
                _save(self._identity, self._passed)


def passed_trials(source: str, folder: str, model: Any, options: LoadOptions, way: str) -> PassedTrials:
    """Those of a model loaded from files. folder: of its configuration; way: what becomes of its layers.

    Nothing is kept of a model whose code is not transformers' own, or that was loaded with arguments of the caller's.
    """
    files = _files(source) or _files(folder)
    if files is None or options.extra or not type(model).__module__.startswith("transformers.models."):
        return PassedTrials()
    versions = f"torch {torch.__version__} transformers {transformers.__version__} slipstream {_digest_of_code()}"
    machine = f"{platform.machine()} {processor().model_name} threads {torch.get_num_threads()} {model.device}"
    switches = {name: value for name, value in sorted(os.environ.items()) if name.startswith("SLIPSTREAM_")}
    what = f"{type(model).__name__} {model.dtype} {arithmetic_of(model)} {way} fast {options.fast} {switches}"
    return PassedTrials(f"{machine} {versions} {what} {model.config.to_json_string()} {files}")


def _files(source: str) -> str | None:
    """What files a model was read from, as the system tells them apart; None if this names no file and no folder."""
    path = Path(source).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    else:
        return None
    return " ".join(map(_identity, files))


def _identity(file: Path) -> str:
    """A file's name, size, times and some of its bytes: other weights of the same size may be copied with their time.

    The first bytes of weights are a header that says nothing of the numbers, so bytes are taken from all over the file.
    """
    about, digest = file.stat(), hashlib.sha256()
    with file.open("rb") as opened:
        for part in range(PARTS):
            opened.seek(max(0, about.st_size - PART_BYTES) * part // (PARTS - 1))
            digest.update(opened.read(PART_BYTES))
    return f"{file.absolute()} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {digest.hexdigest()[:20]}"


@cache
def _digest_of_code() -> str:
    """Of all that loads and computes: a version number stays the same while somebody works on it."""
    folder = Path(slipstream.models.__path__[0])
    files = sorted(file for kind in ("*.py", "*.c", "*.h") for file in folder.rglob(kind))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:20]


def _file(identity: str) -> Path:
    return cache_folder() / "trials" / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.json"


def _read(identity: str) -> set[str]:
    try:
        saved = json.loads(_file(identity).read_text())
        return set(map(str, saved["passed"])) if saved["identity"] == identity else set()
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.info("%s is damaged, so the model is tried again: %s", _file(identity), error)
        return set()


def _save(identity: str, passed: set[str]) -> None:
    """A cache folder that cannot be written is no reason to stop: the next process tries again."""
    file = _file(identity)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"passed": sorted(passed), "identity": identity}))
        partial.replace(file)
