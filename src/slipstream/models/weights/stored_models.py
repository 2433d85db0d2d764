"""Models on this machine: those in Slipstream's cache folder and those in Hugging Face's."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UsageError, os_reason
from slipstream.models.cache_folder import PANELS, cache_folder, panels_folder
from slipstream.models.weights.model_files import EMBEDDED, is_gguf, list_models, not_loaded

log = logging.getLogger("slipstream")

# files of a repository that are not needed: weights in other formats, and second copies
NOT_NEEDED = (
    *("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "*.tflite", "consolidated*"),
    *("onnx/*", "openvino/*", "coreml/*", "original/*", "metal/*"),
)
PICKLED = ("pytorch_model*.bin", "adapter_model.bin")  # of repositories without safetensors files


@dataclass(frozen=True)
class StoredModel:
    """A model on the disk."""

    name: str
    num_bytes: int  # of its weights, or of its folder in Hugging Face's cache
    modified: float  # seconds since 1970
    architecture: str
    folder: Path
    place: str  # the cache it is in, "slipstream" or "hugging face"; "packed": matrices of a GGUF file
    remove: Callable[[], None]  # deletes it

    def to_dict(self) -> dict[str, Any]:
        """The model as values that JSON knows."""
        facts = {"name": self.name, "gigabytes": self.num_bytes / 1e9, "modified": self.modified, "place": self.place}
        return {**facts, "architecture": self.architecture, "folder": str(self.folder)}


def stored_models() -> list[StoredModel]:
    """The models of both caches, by name. Logs a warning where Hugging Face's cannot be read."""
    return sorted([*_in_cache_folder(), *_packed(), *_in_hub_cache()], key=lambda model: model.name.lower())


def _in_cache_folder() -> list[StoredModel]:
    models = []
    for item in list_models():
        folder = Path(item["folder"])
        modified = max(file.stat().st_mtime for file in folder.iterdir())
        size, name = round(item["gigabytes"] * 1e9), str(item["name"])
        remove = _remover(name, folder)
        models.append(StoredModel(name, size, modified, item["architecture"], folder, "slipstream", remove))
    return models


def _remover(name: str, folder: Path) -> Callable[[], None]:
    def remove() -> None:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
        folder.with_name(f"{name}.gguf").unlink(missing_ok=True)  # the file it was made from

    return remove


def _packed() -> list[StoredModel]:
    models = []
    for file in panels_folder().glob(f"*{PANELS}"):
        status = file.stat()
        models.append(StoredModel(file.name, status.st_size, status.st_mtime, "", file, "packed", file.unlink))
    return models


def _in_hub_cache() -> list[StoredModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        log.warning("Hugging Face's cache cannot be read: %s", error)
        return []
    models = []
    for repo in cache.repos:
        if repo.repo_type != "model" or not repo.size_on_disk:
            continue
        strategy = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
        models.append(
            StoredModel(
                repo.repo_id,
                repo.size_on_disk,
                repo.last_modified,
                "",
                repo.repo_path,
                "hugging face",
                strategy.execute,
            )
        )
    return models


def remove_model(name: str) -> StoredModel:
    """Delete a model from the cache it is in; returns what it was. UsageError if neither cache has it."""
    models = stored_models()
    model = next((model for model in models if model.name == name), None)
    if model is None:
        names = [model.name for model in models]
        nearest = get_close_matches(name, names, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        built_in = "is built in and takes no space" if name == "toy" else "is not in the caches"
        raise UsageError(f"model {name!r} {built_in}{hint}; allowed: {', '.join(names) or 'none, both are empty'}")
    try:
        model.remove()
    except OSError as error:
        raise SlipstreamError(f"model {name!r} could not be removed from {model.folder}: {os_reason(error)}") from error
    return model


def pull_model(name: str) -> Path:
    """Download a model so that it can be used without a network; returns its folder.

    name: the default model's or a hub id. Raises `UsageError` for what cannot be downloaded.
    """
    if name == EMBEDDED:
        from slipstream.models.weights.default_model import embedded_model

        return embedded_model()
    if name == "toy":
        raise UsageError("model 'toy' is built in; allowed: smollm2 or a hub id")
    if is_gguf(name) or Path(name).expanduser().exists() or (cache_folder() / name / "config.json").is_file():
        raise UsageError(f"model {name!r} is on this machine already; allowed: smollm2 or a hub id")
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when huggingface_hub is imported
    from slipstream.models.weights.hub import check_connected
    from slipstream.models.weights.resolve import place_of

    repository = place_of(name)  # refuses names that no hub id can have, and near misses of cached ones
    check_connected(repository)
    from huggingface_hub import constants, snapshot_download

    if not sys.stderr.isatty() and not constants.is_offline_mode():
        log.info("downloading %s from the Hugging Face Hub ...", repository)

    from slipstream.models.weights.transformers_reader import reader_errors

    try:
        folder = Path(snapshot_download(repository, ignore_patterns=list(NOT_NEEDED)))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repository, allow_patterns=list(PICKLED)))
    except reader_errors() as error:
        raise not_loaded(name, repository, error) from error
    if not any(file for pattern in ("*.safetensors", *PICKLED) for file in folder.glob(pattern)):
        raise SlipstreamError(
            f"model {name!r} has no weights in safetensors files; allowed: a repository with such files (of one with "
            f"GGUF files, download the one you want: hf download {name} FILE.gguf, and name that file)"
        )
    return folder
