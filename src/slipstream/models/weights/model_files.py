"""Names that users give to models: folders, names in the cache, GGUF files and hub ids. Imports no framework."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from slipstream.checks import expanded
from slipstream.errors import SlipstreamError, one_line
from slipstream.models.cache_folder import cache_folder

log = logging.getLogger("slipstream")

EMBEDDED = "smollm2"  # the default target, which needs no hub
NO_DRAFT = "none"  # no draft model, not even one that the target brings
NO_OPTIONS: Mapping[str, Any] = {}
MAGIC = b"GGUF"  # the first bytes of such a file
READ = (".safetensors", ".bin", ".json", ".model", ".gguf")  # extensions of files that are read
LFS_POINTER = b"version https://git-lfs"  # likewise of pointers, which Git stores in place of large files
CONVERSION = "conversion.json"  # the file that says which version made a folder from a GGUF file; written last
VERSION = 3  # 3: in SentencePiece vocabularies, each piece between whole tokens begins with a space


def is_gguf(source: str) -> bool:
    """True if this names a GGUF file, judged by its content or, if that cannot be read, its extension."""
    path = expanded(source)
    ending = path.suffix.lower() == ".gguf"
    try:
        if not path.is_file():  # reading a pipe might never end
            return ending and not path.is_dir()
        with path.open("rb") as stream:
            return ending or stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return ending


def refuse_pointers(place: Path) -> None:
    """Refuse a pointer that Git without LFS checked out in place of a file, or of any file in a folder."""
    for file in [place] if place.is_file() else sorted(place.glob("*")):
        if file.suffix not in READ or not file.is_file():
            continue
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise SlipstreamError(
                    f"{str(file)!r} is only a pointer of Git LFS; allowed: the file itself, which `git lfs pull` "
                    "fetches"
                )


def is_converted(folder: Path) -> bool:
    """True if this version has converted a GGUF file to this folder, completely."""
    try:
        return bool(json.loads((folder / CONVERSION).read_text(encoding="utf-8"))["version"] == VERSION)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def known_names() -> list[str]:
    """Names that need no hub: the toy, the default model and those in the cache."""
    return sorted({"toy", EMBEDDED, *(config.parent.name for config in cache_folder().glob("*/config.json"))})


def models_at_hand() -> str:
    """The end of a message about an unknown name, which lists available models."""
    names = ", ".join(known_names())
    return f"Available here: {names}; also allowed: a folder, a .gguf file, a hub id or a name from `slipstream models`"


def not_loaded(source: str, folder: str, error: Exception) -> SlipstreamError:
    """The error to raise where reading a model raised `error`."""
    if (refusal := code_of_its_own(source, error)) is not None:
        return refusal
    reason = one_line(error)
    if isinstance(error, UnpicklingError):  # PyTorch's own message advises running the file's code
        reason = "its .bin file is damaged, or holds more than tensors; allowed: .safetensors, or only tensors"
    if Path(folder).exists():
        refuse_pointers(Path(folder))
        return SlipstreamError(f"model {source!r} could not be loaded: {reason}")
    from huggingface_hub.constants import is_offline_mode  # not at the top: help and usage errors must not import it

    offline = "it is not asked, as HF_HUB_OFFLINE is set" if is_offline_mode() else None
    reason = offline or _why_refused(folder, error) or reason
    nearest = get_close_matches(source, known_names(), 1)
    gguf = f" (if it has GGUF files, write {source}:Q4_K_M)" if "config.json" in reason else ""
    hints = "" if "/" in source else f" {models_at_hand()}{f' (did you mean {nearest[0]}?)' if nearest else ''}."
    return SlipstreamError(
        f"model {source!r} was not found locally, and could not be downloaded from the Hugging Face Hub.{hints} "
        f"The hub: {reason.partition('. ')[0]}{gguf}"
    )


def _why_refused(repository: str, error: BaseException | None) -> str | None:
    """Explains a refusal by the hub and the remedy; None if neither the error nor its causes are a refusal."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    if isinstance(error, GatedRepoError):
        return (
            f"{repository} is gated: accept its terms at https://huggingface.co/{repository}, then run `hf auth login` "
            "or set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no repository {repository} that you may read: check the name; for a private one run `hf auth "
            "login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repository} has no such revision"
    if (status := error.response.status_code) in (401, 403):
        return f"it refuses access with status {status}: check the token in HF_TOKEN or of `hf auth login`"
    return None


def code_of_its_own(source: str, error: Exception) -> SlipstreamError | None:
    """The error to raise if `error` means that a model needs code from its repository; else None."""
    if "trust_remote_code" not in str(error):
        return None
    return SlipstreamError(
        f"model {source!r} needs code of its own, which would run with your rights; allowed: load_options="
        '{"trust_remote_code": True}, if you trust its author'
    )


def list_models() -> list[dict[str, Any]]:
    """The models in the cache: name, architecture, size, folder. Those with a damaged config.json are left out."""
    models = []
    for config in sorted(cache_folder().glob("*/config.json")):
        try:
            architectures = json.loads(config.read_text(encoding="utf-8"))["architectures"]
            name = str(architectures[0]) if architectures else "?"
            weights = sum(file.stat().st_size for file in config.parent.glob("*.safetensors"))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            log.warning("%s is damaged and skipped: %s: %s", config, type(error).__name__, one_line(error))
            continue
        item = {"name": config.parent.name, "architecture": name, "gigabytes": weights / 1e9}
        models.append({**item, "folder": str(config.parent)})
    return models


def quiet() -> None:
    """Silence the progress bars and the advice of transformers in this process; errors still raise."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_HUB_VERBOSITY"] = "critical"  # read when it is imported
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if "transformers" in sys.modules:  # it has read the environment before
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
