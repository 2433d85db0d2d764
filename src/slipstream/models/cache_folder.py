"""The folder of converted models, compiled kernels and calibrations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import SlipstreamError


def cache_folder() -> Path:
    """$SLIPSTREAM_MODELS, or ~/.cache/slipstream/models. It may be missing or read-only."""
    return Path(os.environ.get("SLIPSTREAM_MODELS") or users_cache_folder())


def users_cache_folder() -> Path:
    """The folder where the environment names none."""
    return Path.home() / ".cache" / "slipstream" / "models"


@contextmanager
def writable(name: str, folder: Path) -> Iterator[None]:
    """Say in one line that the cache is needed here if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise SlipstreamError(
            f"{name} must be converted, but the cache folder {folder} cannot be written "
            f"({error.strerror or str(error)}); set SLIPSTREAM_MODELS to a folder that can"
        ) from error
