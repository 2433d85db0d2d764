"""The folder of converted models, compiled kernels and measurements."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import SlipstreamError, one_line, os_reason

PANELS = ".panels"  # file name extension of packed matrices

log = logging.getLogger("slipstream")

Measured = TypeVar("Measured")


def cache_folder() -> Path:
    """$SLIPSTREAM_MODELS, or ~/.cache/slipstream/models. It may be missing or read-only."""
    return Path(os.environ.get("SLIPSTREAM_MODELS") or users_cache_folder())


def panels_folder() -> Path:
    """The folder of large models' packed matrices. It may be missing."""
    return cache_folder() / "panels"


def users_cache_folder() -> Path:
    """The cache folder that is used unless the environment names another."""
    return Path.home() / ".cache" / "slipstream" / "models"


@contextmanager
def writable(name: str, folder: Path) -> Iterator[None]:
    """Turn a failed write of the block into one line: `name` must be converted, but `folder` cannot be written."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            reason = os_reason(error)
        elif "(os error " in str(error):  # tokenizers and safetensors raise other classes, where the disk is full
            reason = one_line(error)
        else:
            raise
        raise SlipstreamError(
            f"{name} must be converted, but the cache folder {folder} cannot be written "
            f"({reason}); set SLIPSTREAM_MODELS to a folder that can"
        ) from error


def read_measured(kind: str, identity: str, parse: Callable[[dict[str, Any]], Measured]) -> Measured | None:
    """The values saved under this kind and identity, parsed; None if there are none or, with a warning, if damaged.

    A digest reveals changed values, so `parse` need not check them.
    """
    file = _measured_file(kind, identity)
    if not file.is_file():
        return None
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        values = saved["values"]
        if saved["digest"] != _digest(identity, values):
            raise ValueError("its digest does not match its values")
        return parse(values)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s is damaged and measured again: %s: %s", file, type(error).__name__, error)
        return None


def save_measured(kind: str, identity: str, values: Mapping[str, Any]) -> None:
    """Save values for `read_measured`. Raises OSError where the cache folder cannot be written."""
    from slipstream.durable_files import replaced  # imports filelock

    file = _measured_file(kind, identity)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file) as partial:
        as_read = json.loads(json.dumps(values))  # keys become strings
        saved = {"identity": identity, "digest": _digest(identity, as_read), "values": as_read}
        partial.write_text(json.dumps(saved, indent=2), encoding="utf-8")


def _digest(identity: str, values: Any) -> str:
    return hashlib.sha256(json.dumps([identity, values], sort_keys=True).encode()).hexdigest()[:16]


def _measured_file(kind: str, identity: str) -> Path:
    return cache_folder() / kind / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.json"
