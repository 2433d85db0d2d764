"""Turns a user's name for a model into a folder or hub id: fetches the default model, converts GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.checks import expanded
from slipstream.errors import UsageError, os_reason
from slipstream.models.cache_folder import cache_folder
from slipstream.models.weights.hub import hub_or_cached
from slipstream.models.weights.model_files import (
    EMBEDDED,
    NO_OPTIONS,
    is_converted,
    is_gguf,
    known_names,
    models_at_hand,
)
from slipstream.models.weights.named_models import short_names, what_to_write

HUB_ADDRESS = re.compile(
    r"https?://(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([^/\s]+/[^/\s?#]+)"
)  # address of a model's page
SIMILAR = 0.75  # difflib's ratio from which a name is taken for a misspelling of another


def resolve(source: str, options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """Turn a user's name for a model into a folder or a hub id; fetches or converts files if needed.

    options: load options. Raises `UsageError` if it is not a model, and for a revision of a local model;
    `SlipstreamError` for a hub id that is not downloaded yet, while the hub cannot be reached.
    """
    place = place_of(source, str(options.get("subfolder", "")))
    is_local = is_gguf(source) or Path(place).is_dir()
    if is_local and options.get("revision", "main") != "main":
        raise UsageError(
            f"load_options revision={options['revision']!r}, but model {source!r} is a local "
            f"{'file' if is_gguf(source) else 'folder'}; allowed: revisions of a hub id"
        )
    return place if is_local else hub_or_cached(place, options)


def place_of(source: str, subfolder: str = "") -> str:
    """`resolve` without asking the hub: a folder, or a hub id that may not exist."""
    if source == EMBEDDED:
        from slipstream.models.weights.default_model import embedded_model

        return str(embedded_model())
    if not source.strip():
        raise UsageError(f"model {source!r} is empty; {models_at_hand()}")
    if is_gguf(source):
        from slipstream.models.weights.gguf_conversion import convert_gguf

        return str(convert_gguf(expanded(source)))
    if address := HUB_ADDRESS.match(source):
        raise UsageError(f"model {source!r} is an address; did you mean {address[1]!r}?")
    path = expanded(source)
    try:
        is_cached = "/" not in source and (cache_folder() / source / "config.json").is_file()
        looks_local = path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1
    except OSError as error:  # a name may be too long, a folder closed to the user
        raise UsageError(f"model {source!r:.80} cannot be looked up: {os_reason(error)}; {models_at_hand()}") from None
    if is_cached:
        return str(_cached(source))
    if looks_local:
        if not (path / subfolder / "config.json").is_file():
            if (path / subfolder / "adapter_config.json").is_file():
                return str(path)
            raise UsageError(
                f"model {source!r} {_why_no_model(path)} allowed: a Hugging Face model folder, a GGUF file or a hub id"
            )
        return str(path)
    if source == "toy":
        raise UsageError("model 'toy' is built in and has no files; allowed here: a model of transformers")
    if "/" not in source and (nearest := get_close_matches(source, known_names(), 1, SIMILAR)):
        raise UsageError(f"unknown model {source!r}; did you mean {nearest[0]}? {models_at_hand()}")
    if ":" in source.partition("/")[0] or any(name.startswith(f"{source.lower()}:") for name in short_names()):
        raise UsageError(f"unknown model {source!r:.120}; {what_to_write(source)}")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        raise UsageError(f"model {source!r:.200} cannot be a hub id; {models_at_hand()}") from None
    return source


def _why_no_model(path: Path) -> str:
    if path.is_file():
        return "is a file, but not a GGUF file (its first four bytes are not 'GGUF');"
    if not path.is_dir():
        return "is not a folder;"
    from slipstream.models.weights.gguf_file import gguf_names

    files = gguf_names(path)
    return f"has no config.json; did you mean its file {files[0]}?" if files else "has no config.json;"


def _cached(name: str) -> Path:
    """The folder of a name in the cache; converted again from the file next to it if an older version made it."""
    folder = cache_folder() / name
    file = folder.with_name(f"{name}.gguf")
    if not is_converted(folder) and file.is_file():
        from slipstream.models.weights.gguf_conversion import convert

        convert(file, folder)
    return folder
