"""Checks that the Hugging Face Hub can be reached, before anything is fetched from it.

huggingface_hub itself retries each file silently for 23 seconds, or for minutes where a firewall drops packets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, one_line
from slipstream.models.weights.model_files import NO_OPTIONS, not_loaded

log = logging.getLogger("slipstream")

PAUSE_SECONDS = 1.0  # before a second try
KEPT_SECONDS = 60  # the answer is remembered, since one command asks for several models
CONFIGS = ("config.json", "adapter_config.json")


def hub_or_cached(repository: str, options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """The hub id or, if the hub cannot be reached, the folder of an earlier download.

    options: load options. Raises `SlipstreamError` if there is none.
    """
    reason = None if options.get("local_files_only") else why_unreachable()
    if reason is None:
        return repository
    folder = _downloaded(repository, options)
    if folder is None:
        raise _not_connected(repository, reason)
    log.warning("no connection to the Hugging Face Hub (%s): using the earlier download of %s", reason, repository)
    return str(folder)


def check_connected(repository: str) -> None:
    """Raise `SlipstreamError` if the hub cannot be reached to download this."""
    if (reason := why_unreachable()) is not None:
        raise _not_connected(repository, reason)


def _not_connected(repository: str, reason: str) -> SlipstreamError:
    return not_loaded(repository, repository, ConnectionError(f"no connection ({reason})"))


def why_unreachable() -> str | None:
    """The reason the hub does not answer; None if it answers anything, and in offline mode, where it is not asked."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return None
    return _why_unreachable(constants.ENDPOINT, int(time.monotonic() // KEPT_SECONDS))


@lru_cache(maxsize=1)
def _why_unreachable(endpoint: str, _period: int) -> str | None:
    """_period: a new value bypasses the memo."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    begin = time.monotonic()
    while True:
        try:
            # connecting over a slow line takes seconds; users can set HF_HUB_ETAG_TIMEOUT
            get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return None
        except network_error() as error:
            if time.monotonic() - begin > PAUSE_SECONDS:  # after a second try, or a slow first one
                return one_line(error)
        time.sleep(PAUSE_SECONDS)


def network_error() -> Any:
    """The class of network errors: httpx's or httpx2's, whichever this version of huggingface_hub uses."""
    from huggingface_hub import errors

    return vars(errors)["HTTPError"]


def _downloaded(repository: str, options: Mapping[str, Any]) -> Path | None:
    """The folder of a repository in Hugging Face's cache, if it has the revision."""
    from huggingface_hub import try_to_load_from_cache

    subfolder = str(options.get("subfolder") or "")
    prefix = f"{subfolder}/" if subfolder else ""
    revision, cache = options.get("revision"), options.get("cache_dir")
    for name in CONFIGS:
        file = try_to_load_from_cache(repository, f"{prefix}{name}", cache_dir=cache, revision=revision)
        if isinstance(file, str):
            return Path(file.removesuffix(f"{prefix}{name}"))
    return None
