"""One warning per process and reason where a faster way of computing cannot be used."""

from __future__ import annotations

import logging
from functools import cache

log = logging.getLogger("slipstream")


@cache
def warn_slower(reason: str) -> None:
    """Tell the user, once per process, why this runs slower than it could. The results are the same."""
    log.warning("slower than it could be: %s", reason)
