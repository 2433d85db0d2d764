"""The server's log: lines with time and level, which hold no folders of the machine and no texts of requests."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import datetime
from typing import Any

import pytest

from slipstream import UsageError
from slipstream.apps.server import server_log
from slipstream.apps.server.error_objects import as_api_error
from slipstream.apps.server.server_log import JsonLines, TextLines, use_format, use_level, without_folders
from slipstream.models.toy import ToyTokenizer
from tests.support.running_server import running_server, toy_with

LOG = logging.getLogger("slipstream.server")


def record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (entry,) = caplog.records
    caplog.clear()
    return entry


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loading /home/ann/models/x.gguf ...", "loading x.gguf ..."),
        ("'/home/ann/my models/x.gguf' is damaged", "'x.gguf' is damaged"),
        ('File "/usr/lib/python3/site.py", line 3', 'File "site.py", line 3'),
        ("C:\\Users\\ann\\x.gguf", "x.gguf"),
        ("at http://127.0.0.1:8000/v1/models, /v1/models and a/tmp/b", None),
        ("Qwen/Qwen3-8B at http://127.0.0.1/tmp/x", None),
    ],
)
def test_absolute_paths_lose_their_folders_and_addresses_stay(text: str, shown: str | None) -> None:
    assert without_folders(text) == (text if shown is None else shown)


def test_a_line_has_time_and_level_and_an_object_has_the_fields_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    server_log.log_request({"method": "GET", "path": "/x", "key": 'a"\nb', "rows": None}, logging.WARNING)
    entry = record(caplog)
    time, level, message = TextLines().format(entry).split(" ", 2)
    assert datetime.fromisoformat(time).utcoffset() is not None and level == "WARNING"
    assert message == 'request method=GET path=/x key="a\\"\\nb"'
    fields = json.loads(JsonLines().format(entry))
    assert fields.pop("time") == time
    assert fields == {"level": "warning", "message": "request", "method": "GET", "path": "/x", "key": 'a"\nb'}
    entry = logging.makeLogRecord({"msg": "\x1b[31m \u2028 \udc80", "levelno": logging.INFO, "levelname": "INFO"})
    assert "\x1b" not in TextLines().format(entry) and JsonLines().format(entry).isascii()


def test_a_traceback_of_a_request_has_its_message_only_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    prompt = "".join(["a ", "prompt"])  # its parts are in the source lines of the traceback

    def failing() -> None:
        raise ValueError(f"cannot read {prompt}")

    for level in (logging.INFO, logging.DEBUG):
        caplog.set_level(level, "slipstream.server")
        try:
            failing()
        except ValueError as error:
            as_api_error(error)
        entry = record(caplog)
        for text in (TextLines().format(entry), json.loads(JsonLines().format(entry))["exception"]):
            assert ("a prompt" in text) is (level == logging.DEBUG)
            assert "ValueError" in text and re.search(r'File "test_server_log.py", line \d+, in failing', text)


def test_an_error_in_a_request_is_logged_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            if "secret" in text:
                raise KeyError(text)
            return super().encode(text)

    caplog.set_level(logging.INFO)
    with running_server(lambda: toy_with(Failing())) as server:
        caplog.clear()
        assert server.complete("my secret").status_code == 500
        traceback, line = (entry for entry in caplog.records if entry.name.startswith(("slipstream", "uvicorn")))
    assert (traceback.levelname, line.levelname) == ("ERROR", "ERROR")
    assert 'status=500 model="toy"' in line.getMessage() and "details" in line.getMessage()
    assert not any("secret" in TextLines().format(entry) for entry in (traceback, line))


@pytest.mark.parametrize(("status", "level"), [(429, "WARNING"), (400, "INFO"), (200, "INFO")])
def test_the_level_of_a_request_tells_whether_the_server_is_at_fault(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int, level: str
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    with running_server(max_queued_requests=1) as server:
        if status == 429:
            monkeypatch.setattr(server.service.admission, "_share", lambda caller, limit: ([caller], 1))
        fields: dict[str, Any] = {"max_tokens": 2} | ({"n": -1} if status == 400 else {})
        caplog.clear()
        assert server.complete("A heron", **fields).status_code == status
        (line,) = (entry for entry in caplog.records if "request " in entry.getMessage())
    assert line.levelname == level


def test_everything_that_is_printed_becomes_an_object(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    for name in ("stderr", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr("threading.excepthook", lambda *ended: None)
    use_format("json")
    print("one\ntw", file=sys.stderr, end="")
    print("o\n\nerror: three", file=sys.stderr)
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        ("INFO", "one"),
        ("INFO", "two"),
        ("ERROR", "three"),
    ]
    assert not capfd.readouterr().err and not sys.stderr.isatty()


def test_formats_and_levels_are_named() -> None:
    with pytest.raises(UsageError, match="--log-format 'yaml'; allowed: text, json"):
        use_format("yaml")
    with pytest.raises(UsageError, match="--log-level 'INFO'; allowed: debug, info, warning, error"):
        use_level("INFO")
