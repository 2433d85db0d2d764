"""Downloads GGUF files from the Hugging Face Hub into its own cache.

A file has a temporary name until it is complete and has the digest that the hub states, so an incomplete file is never
loaded. An interrupted download continues where it stopped; huggingface_hub itself would start again.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from slipstream.checks import expanded
from slipstream.durable_files import locked, sync
from slipstream.errors import SlipstreamError, UsageError, one_line, os_reason
from slipstream.models.notices import TimeLeft, announce, progress_bar
from slipstream.models.weights.hub import check_connected, network_error
from slipstream.models.weights.model_files import NO_OPTIONS, not_loaded
from slipstream.models.weights.named_models import (
    DEFAULT,
    HubModel,
    HubName,
    downloaded_file,
    hub_name,
    models_among,
    wanted_among,
)

ATTEMPTS, PAUSE_SECONDS = 5, 1.0  # attempts in a row without progress
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
PARTIAL = ".slipstream"  # extension of incomplete files
PASSING = (408, 429, 500, 502, 503, 504)  # HTTP statuses of temporary failures


def local_file(source: str, options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """The path of the GGUF file that a name means, downloaded if needed; other sources are returned unchanged.

    options: load options. Raises `UsageError` if the repository does not have the file, `SlipstreamError` if it cannot
    be downloaded.
    """
    name = hub_name(source)
    if name is None:
        return source
    if folder := options.get("subfolder"):
        raise UsageError(
            f"load_options subfolder={folder!r} with a GGUF file; allowed: {name.repository}:{folder}/FILE"
        )
    file = None if options.get("force_download") else downloaded_file(name, options)
    return str(file or fetched(source, name, options))


def fetched(source: str, name: HubName, options: Mapping[str, Any] = NO_OPTIONS) -> Path:
    """The newest version of a file on the hub, or its first part; downloads it if needed."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    repository, revision = name.repository, options.get("revision") or name.revision
    token, cache_folder = options.get("token"), expanded(options.get("cache_dir") or constants.HF_HUB_CACHE)
    try:
        if options.get("local_files_only") or constants.is_offline_mode():
            raise OfflineModeIsEnabled("it is not asked, as local_files_only is set")
        check_connected(source)
        listing = HfApi(token=token).model_info(repository, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in listing.siblings or ()}
        files = _only_one(source, name, sizes).files
        return _Download(source, repository, revision, token, cache_folder).of(files)
    except SlipstreamError:
        raise
    except HFValidationError:
        raise UsageError(
            f"model {source!r:.120} cannot be on the hub; allowed in a repository's name: up to 96 letters, digits, "
            "'-', '_' and '.'"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, network_error()) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise SlipstreamError(
                f"model {source!r} cannot be stored in {cache_folder}: {os_reason(error)}; set HF_HOME to a folder "
                "that can be written"
            ) from error
        raise not_loaded(source, repository, error) from error


def _only_one(source: str, name: HubName, sizes: Mapping[str, int]) -> HubModel:
    """The model that the name means. Raises `UsageError`, which lists the models, if it means none or several."""
    models = models_among(sizes)
    meant = wanted_among(models, name.wanted)
    if len(meant) == 1:
        return meant[0]
    what = f"{name.repository} has no GGUF files"
    if meant:
        what = f"{name.repository} has {len(meant)} models that are {name.wanted!r}"
    elif models:
        what = f"{name.repository} has no {name.wanted!r}{' (the default)' if name.wanted == DEFAULT else ''}"
    labels = [model.label for model in models]
    choices = [
        f"{name.repository}:{model.label if labels.count(model.label) == 1 else model.files[0]} "
        f"({sum(sizes[file] for file in model.files) / 1e9:.1f} GB)"
        for model in meant or models
    ]
    raise UsageError(f"model {source!r}: {what}; allowed: {', '.join(choices) or 'a repository with such files'}")


@dataclass(frozen=True)
class _Remote:
    """A file on the hub. etag: its digest, which names its content in the cache."""

    name: str
    url: str
    etag: str
    size: int
    is_cached: bool

    @property
    def title(self) -> str:
        return Path(self.name).name

    def digest(self, path: Path) -> str:
        """The digest of a local file to compare with the hub's: SHA-256, or git's for small files."""
        begin = hashlib.sha256() if len(self.etag) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: begin).hexdigest()


@dataclass(frozen=True)
class _Download:
    """The download of a model's files. source: the model as the user named it."""

    source: str
    repository: str
    revision: str
    token: Any
    cache_folder: Path

    def of(self, files: Sequence[str]) -> Path:
        """Download the files that are not in the cache; return the path of the first file."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.repository, repo_type="model")
        blobs, locks = self.cache_folder / folder / "blobs", self.cache_folder / ".locks" / folder
        for needed in (blobs, locks):
            needed.mkdir(parents=True, exist_ok=True)
        remotes, paths = [self._remote(file) for file in files], list[Path]()
        self._check_disk([remote for remote in remotes if not remote.is_cached], blobs)
        arguments = {"revision": self.revision, "cache_dir": self.cache_folder, "token": self.token}
        for remote in remotes:
            if not remote.is_cached:
                self._store(remote, blobs, locks)
            # links the content to its name in the cache; nothing is downloaded
            paths.append(Path(hf_hub_download(self.repository, remote.name, **arguments)))
            if not paths[-1].is_symlink():  # a system without links has made a copy
                (blobs / remote.etag).unlink(missing_ok=True)
        return paths[0]

    def _remote(self, name: str) -> _Remote:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

        url = hf_hub_url(self.repository, name, revision=self.revision)
        metadata = get_hf_file_metadata(url, token=self.token)
        etag, size, commit = metadata.etag or "", metadata.size, metadata.commit_hash
        if not DIGEST.fullmatch(etag) or size is None or commit is None:
            raise SlipstreamError(
                f"model {self.source!r}: {constants.ENDPOINT} does not state the digest, the size and the commit of "
                f"{name}; allowed: a hub that does, see HF_ENDPOINT"
            )
        path = try_to_load_from_cache(self.repository, name, cache_dir=self.cache_folder, revision=commit)
        return _Remote(name, url, etag, size, isinstance(path, str))

    def _check_disk(self, files: Sequence[_Remote], blobs: Path) -> None:
        """Refuse a download that does not fit on the disk."""
        there = sum(_size(blobs / file.etag) or _size(blobs / f"{file.etag}{PARTIAL}") for file in files)
        needed, free = sum(file.size for file in files) - there, shutil.disk_usage(blobs).free
        if needed > free:
            raise SlipstreamError(
                f"model {self.source!r} needs {needed / 1e9:.1f} GB on the disk of {self.cache_folder}, which has "
                f"{free / 1e9:.1f} GB left; free some (`slipstream models rm NAME`), or set HF_HOME to another disk"
            )

    def _store(self, file: _Remote, blobs: Path, locks: Path) -> None:
        """Store a file's content in the cache only if it is complete and has the right digest."""
        blob, partial, lock_file = blobs / file.etag, blobs / f"{file.etag}{PARTIAL}", locks / f"{file.etag}.lock"
        if (lock := locked(lock_file)) is None:
            announce(f"waiting for another process, which is downloading {file.title} ...")
            lock = locked(lock_file, wait=True)
        assert lock is not None
        try:
            if blob.exists():
                return
            self._fill(partial, file)
            digest = file.digest(partial)
            if digest != file.etag:
                partial.unlink()
                raise SlipstreamError(
                    f"model {self.source!r}: {file.title} arrived damaged and was deleted: its digest is {digest}, "
                    f"the hub's {file.etag}; run the command again"
                )
            sync(partial)
            partial.replace(blob)
        finally:
            lock.release()

    def _fill(self, partial: Path, file: _Remote) -> None:
        """Download the rest of a file, in several attempts if the connection ends."""
        from huggingface_hub.errors import HfHubHTTPError

        title, columns = file.title, (DownloadColumn(), TransferSpeedColumn(), TimeLeft())
        message = f"downloading {title} ({file.size / 1e9:.2f} GB) from {self.repository} ..."
        failures = 0
        with progress_bar(f"downloading {title}", message, *columns, total=file.size) as progress:
            while (begin := _size(partial)) < file.size:
                try:
                    self._append(partial, file, begin, progress)
                    reason = "the server ended it"
                except HfHubHTTPError as error:
                    if error.response.status_code == 416:  # the file has no bytes after those that are here
                        partial.unlink(missing_ok=True)
                    elif error.response.status_code not in PASSING:
                        raise
                    reason = one_line(error)
                except network_error() as error:
                    reason = one_line(error)
                arrived = _size(partial)
                failures = 1 if arrived > begin else failures + 1
                if failures > ATTEMPTS:
                    raise SlipstreamError(
                        f"model {self.source!r}: the connection ended after {arrived:,} of {file.size:,} bytes of "
                        f"{title}: {reason}; the same command continues there"
                    )
                if arrived < file.size:
                    time.sleep(PAUSE_SECONDS)

    def _append(self, partial: Path, file: _Remote, begin: int, progress: Progress) -> None:
        """Append one response of the hub, or begin again if it does not send partial content."""
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if begin:
            headers["Range"] = f"bytes={begin}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", file.url, headers=headers, timeout=timeout, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            is_rest = answer.status_code == 206
            progress.update(progress.task_ids[0], completed=begin if is_rest else 0)
            with partial.open("ab" if is_rest else "wb") as stream:
                for block in answer.iter_bytes():
                    stream.write(block)
                    progress.update(progress.task_ids[0], advance=len(block))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
