"""Models on this machine, in Slipstream's cache folder and in Hugging Face's."""

from __future__ import annotations

import glob
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.checks import expanded
from slipstream.durable_files import locked
from slipstream.errors import SlipstreamError, UsageError, os_reason
from slipstream.models.cache_folder import PANELS, cache_folder, panels_folder
from slipstream.models.weights.default_model import WHEEL
from slipstream.models.weights.gguf_file import PART
from slipstream.models.weights.hub import check_connected, network_error
from slipstream.models.weights.hub_files import fetched, local_file
from slipstream.models.weights.model_files import EMBEDDED, NO_DRAFT, is_gguf, list_models, not_loaded
from slipstream.models.weights.named_models import (
    HubModel,
    gigabytes_needed,
    hub_name,
    models_among,
    named_model,
    wanted_among,
)

log = logging.getLogger("slipstream")

# unneeded files of a repository: weights in other formats, second copies, and descriptions for readers
NOT_NEEDED = (
    *("*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", ".gitattributes"),
    *("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "*.tflite", "consolidated*"),
    *("onnx/*", "openvino/*", "coreml/*", "original/*", "metal/*"),
)
PICKLED = ("pytorch_model*.bin", "adapter_model.bin")  # of repositories without safetensors files


@dataclass(frozen=True)
class StoredModel:
    """A model on the disk."""

    name: str
    num_bytes: int  # of its files
    modified: float  # seconds since 1970
    architecture: str
    folder: Path
    # the cache it is in, "slipstream" or "hugging face"; "packed": matrices of a GGUF file; "unfinished": downloads
    place: str
    remove: Callable[[], None]  # deletes it
    gguf: HubModel | None = None  # its files in a repository, if that has several models

    def to_dict(self) -> dict[str, Any]:
        """The model as JSON values."""
        facts = {"name": self.name, "gigabytes": self.num_bytes / 1e9, "modified": self.modified, "place": self.place}
        return {**facts, "architecture": self.architecture, "folder": str(self.folder)}


def stored_models() -> list[StoredModel]:
    """The models of both caches, by name. Warns if Hugging Face's cannot be read."""
    return sorted([*_in_cache_folder(), *_packed(), *_in_hub_cache()], key=lambda model: model.name.lower())


def _in_cache_folder() -> list[StoredModel]:
    models = []
    for item in list_models():
        folder = Path(item["folder"])
        modified = max(file.stat().st_mtime for file in folder.iterdir())
        name = str(item["name"])
        source = folder.with_name(f"{name}.gguf")  # the file it was made from, if there is one
        files = [file for file in (*folder.rglob("*"), source) if file.is_file()]
        size, remove = sum(file.stat().st_size for file in files), _remover(folder, source)
        models.append(StoredModel(name, size, modified, item["architecture"], folder, "slipstream", remove))
    for file in cache_folder().glob(f"{WHEEL}*"):  # of the default model

        def remove_partial(file: Path = file) -> None:
            with _no_download(file.with_name(f".{EMBEDDED}.lock"), file):
                file.unlink()

        status, name = file.stat(), f"{EMBEDDED}:unfinished"
        models.append(StoredModel(name, status.st_size, status.st_mtime, "", file, "unfinished", remove_partial))
    return models


def _remover(folder: Path, source: Path) -> Callable[[], None]:
    def remove() -> None:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
        source.unlink(missing_ok=True)

    return remove


def _packed() -> list[StoredModel]:
    models = []
    for file in panels_folder().glob(f"*{PANELS}"):
        status = file.stat()
        models.append(StoredModel(file.name, status.st_size, status.st_ctime, "", file, "packed", file.unlink))
    return models


def _in_hub_cache() -> list[StoredModel]:
    from huggingface_hub import constants

    models = []
    try:
        for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
            models += _in_repository(folder.name.removeprefix("models--").replace("--", "/"), folder)
    except OSError as error:
        log.warning("Hugging Face's cache cannot be read: %s", error)
    return models


def _in_repository(name: str, folder: Path) -> list[StoredModel]:
    """The models of a repository in Hugging Face's cache: GGUF models, other files, and unfinished downloads."""
    snapshots = folder / "snapshots"
    files = [file for file in snapshots.rglob("*") if file.is_file()]
    paths = {file: file.relative_to(snapshots).as_posix().partition("/")[2] for file in files}
    ggufs = models_among(set(paths.values()))
    labels = [gguf.label for gguf in ggufs]
    groups: list[tuple[str, HubModel | None, list[Path]]] = []
    for gguf in ggufs:
        label = gguf.label if labels.count(gguf.label) == 1 else gguf.files[0]
        groups.append((f"{name}:{label}", gguf, [file for file in files if paths[file] in gguf.files]))
    of_models = {path for gguf in ggufs for path in gguf.files}
    groups.append((name, None, [file for file in files if paths[file] not in of_models]))
    named = {file.resolve() for file in files}
    parts = [blob for blob in (folder / "blobs").glob("*") if blob.is_file() and blob.resolve() not in named]
    groups.append((f"{name}:unfinished", None, parts))
    return [
        StoredModel(
            title,
            sum(blob.stat().st_size for blob in {file.resolve() for file in group}),
            max(file.stat().st_mtime for file in group),
            "",
            folder,
            "unfinished" if group is parts else "hugging face",
            partial(_remove_files, folder, group),
            gguf,
        )
        for title, gguf, group in groups
        if group
    ]


def _remove_files(folder: Path, files: Sequence[Path]) -> None:
    """Delete files of a repository in Hugging Face's cache; the last one takes the folder with it."""
    locks = folder.parent / ".locks" / folder.name
    for file in files:
        blob = file.resolve()
        with _no_download(locks / f"{blob.name.partition('.')[0]}.lock", blob):
            file.unlink()
            if not any(other.resolve() == blob for other in (folder / "snapshots").rglob("*") if other.is_symlink()):
                blob.unlink(missing_ok=True)
    if not any(file.is_file() for place in ("snapshots", "blobs") for file in (folder / place).rglob("*")):
        shutil.rmtree(folder)
        shutil.rmtree(locks, ignore_errors=True)


@contextmanager
def _no_download(lock_file: Path, file: Path) -> Iterator[None]:
    """Hold the lock of a file's download. Raises `SlipstreamError` if another process holds it."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    if (lock := locked(lock_file)) is None:
        raise SlipstreamError(f"{file} is being downloaded by another process; allowed: after that has ended")
    try:
        yield
    finally:
        lock.release()


def remove_model(name: str) -> StoredModel:
    """Delete a model from its cache; returns its description. Raises `UsageError` if neither cache has it."""
    models, named = stored_models(), hub_name(name)
    model = next((model for model in models if model.name == name), None)
    if model is None and named is not None:  # a short name, or another way to name a file
        ggufs = [model for model in models if model.gguf and model.name.partition(":")[0] == named.repository]
        meant = wanted_among([model.gguf for model in ggufs if model.gguf], named.wanted)
        model = next((model for model in ggufs if len(meant) == 1 and model.gguf == meant[0]), None)
    if model is None:
        names = [model.name for model in models]
        nearest = get_close_matches(name if named is None else named.repository, names, 1)
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

    name: a short name, a hub id, or the default model's name. For a repository with GGUF files, fetches only the named
    one and returns its path. Raises `UsageError` for names that cannot be downloaded.
    """
    if name == EMBEDDED:
        from slipstream.models.weights.default_model import embedded_model

        return embedded_model()
    if name == "toy":
        raise UsageError("model 'toy' is built in; allowed: smollm2, another short name or a hub id")
    from huggingface_hub.constants import is_offline_mode

    if (named := hub_name(name)) is not None:
        return Path(local_file(name)) if is_offline_mode() else fetched(name, named)
    if os.path.exists(os.path.expanduser(name)) or (cache_folder() / name / "config.json").is_file():
        raise UsageError(f"model {name!r} is on this machine already; allowed: a short name or a hub id")
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when huggingface_hub is imported
    from slipstream.models.weights.resolve import place_of

    repository = place_of(name)  # refuses names that no hub id can have, and near misses of cached ones
    check_connected(repository)
    from huggingface_hub import HfApi, snapshot_download

    if not sys.stderr.isatty() and not is_offline_mode():
        log.info("downloading %s from the Hugging Face Hub ...", repository)

    from slipstream.models.weights.transformers_reader import reader_errors

    try:
        if not is_offline_mode():
            _check_weights(name, [file.rfilename for file in HfApi().model_info(repository).siblings or ()])
        folder = Path(snapshot_download(repository, ignore_patterns=list(NOT_NEEDED)))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repository, allow_patterns=list(PICKLED)))
    except SlipstreamError:
        raise
    except (*reader_errors(), network_error()) as error:
        raise not_loaded(name, repository, error) from error
    _check_weights(name, [file.name for file in folder.iterdir()])
    return folder


def memory_needed(target: str, draft: str | None) -> int:
    """About how many bytes of memory a target and its draft model need; downloads them if needed.

    draft: the user's name for it; None for the one that a short name brings. Raises `UsageError` if it is not a model.
    """
    if draft is None and (named := named_model(target)) is not None:
        draft = named.draft
    num_bytes = sum(_weights_bytes(name) for name in (target, draft) if name not in (None, NO_DRAFT, "mtp"))
    return round(1e9 * gigabytes_needed(num_bytes / 1e9))


def _weights_bytes(name: str) -> int:
    """The size of a model's weights on the disk; downloads them if needed."""
    from slipstream.models.loaded import is_toy
    from slipstream.models.weights.resolve import place_of

    if is_toy(name):
        return 0
    file = local_file(name)
    if is_gguf(file):
        return sum(part.stat().st_size for part in _parts(expanded(file)))
    place = place_of(name)
    if not os.path.isdir(place):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            place = snapshot_download(place, local_files_only=True)
        except LocalEntryNotFoundError:
            place = str(pull_model(name))
    folder = Path(place)
    files = list(folder.glob("*.safetensors")) or [file for name in PICKLED for file in folder.glob(name)]
    return sum(file.stat().st_size for file in files)


def _parts(file: Path) -> list[Path]:
    """All parts of a GGUF file that is split; else the file alone."""
    part = PART.match(file.name)
    names = file.name if part is None else f"{glob.escape(part['stem'])}-*-of-{part['count']}{part['ending'] or ''}"
    return list(file.parent.glob(names if part is not None else glob.escape(names)))


def _check_weights(name: str, files: Sequence[str]) -> None:
    """Refuse a repository without weights for transformers; the message tells how to name its GGUF files."""
    if not any(fnmatch(file, pattern) for file in files for pattern in ("*.safetensors", *PICKLED)):
        models = [f"{name}:{model.label}" for model in models_among(files)]
        allowed = (
            f"its GGUF files: {', '.join(models)}" if models else "a repository with such files, or with GGUF files"
        )
        raise SlipstreamError(f"model {name!r} has no weights in safetensors files; allowed: {allowed}")
