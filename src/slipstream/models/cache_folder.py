"""The folder of converted models, compiled kernels and calibrations."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$SLIPSTREAM_MODELS, or ~/.cache/slipstream/models. It may be missing or read-only."""
    return Path(os.environ.get("SLIPSTREAM_MODELS") or Path.home() / ".cache" / "slipstream" / "models")
