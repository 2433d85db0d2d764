"""The folder in which converted models, compiled kernels and calibrations are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$SLIPSTREAM_MODELS, or ~/.cache/slipstream/models."""
    return Path(os.environ.get("SLIPSTREAM_MODELS") or Path.home() / ".cache" / "slipstream" / "models")
