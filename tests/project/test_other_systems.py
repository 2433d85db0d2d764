"""The package does not need what Windows lacks: Unix modules, and UTF-8 as the encoding of the system."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.processes import PATIENCE

ROOT = Path(__file__).parents[2]
UNIX = ("fcntl", "resource", "termios", "tty", "pwd", "grp")
WITHOUT_THEM = (
    f"import sys; sys.modules.update(dict.fromkeys({UNIX}))\nfrom slipstream.apps.cli import main\n"
    "sys.argv[:1] = ['slipstream']\nmain()"
)
OPENERS = ("read_text", "write_text", "open", "fdopen", "TemporaryFile", "NamedTemporaryFile")
OPENERS += ("run", "Popen", "check_output")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}


def locale_dependent(source: str) -> Iterator[str]:
    """Calls that read or write text in the encoding of the system, which is not UTF-8 on Windows."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(word.arg in (None, "encoding") for word in node.keywords):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name not in OPENERS:
            continue
        words = {word.arg: word.value for word in node.keywords}
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        first = 1 if name == "fdopen" or not owner else 0  # the position of the argument `mode`
        mode = words.get("mode") or (node.args[first] if len(node.args) > first else None)
        is_text: dict[str, bool] = {
            "read_text": not node.args,
            "write_text": len(node.args) < 2,
            "open": owner not in ("os", "archive", "_opener", "Image") and not (mode and "b'" in ast.unparse(mode)),
            "fdopen": not (mode and "b'" in ast.unparse(mode)),
            "TemporaryFile": mode is not None and "b'" not in ast.unparse(mode),
            "NamedTemporaryFile": mode is not None and "b'" not in ast.unparse(mode),
            "run": "text" in words,
            "Popen": "text" in words,
            "check_output": "text" in words,
        }
        if is_text[name]:
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


@pytest.mark.slow
@pytest.mark.parametrize("area", ["src", "packaging", "examples", "benchmarks"])
def test_every_text_file_is_read_and_written_as_utf8(area: str) -> None:
    files = sorted((ROOT / area).rglob("*.py"))
    calls = [
        f"{file.relative_to(ROOT)}, {call}" for file in files for call in locale_dependent(file.read_text("utf-8"))
    ]
    assert files and calls == []


def test_importing_filelock_without_unix_modules_prints_no_warning() -> None:
    script = f"{WITHOUT_THEM[: -len('main()')]}\ntry:\n    main()\nfinally:\n    import filelock"
    process = subprocess.run(
        [sys.executable, "-c", script, "--version"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, ""), process.stderr


def address(log: IO[str]) -> str:
    """The address that a server prints."""
    lines = []
    for line in log:
        lines.append(line)
        if " at http" in line:
            return line.rsplit(" ", 1)[1].strip()
    raise AssertionError("".join(lines))


@pytest.mark.slow
def test_a_batch_job_and_a_server_run_without_unix_modules(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "A heron", "max_tokens": 4}\n', encoding="utf-8")
    batch = ["batch", "in.jsonl", "out.jsonl", "--target", "toy"]
    script = f"{WITHOUT_THEM[: -len('main()')]}import contextlib\nwith contextlib.suppress(SystemExit):\n    main()\n"
    script += "sys.argv[1:] = ['serve', '--target', 'toy', '--port', '0']\nmain()"
    options = {"cwd": tmp_path, "env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", script, *batch], **options) as server:
        assert server.stderr is not None
        try:
            url = address(server.stderr)
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{url}/health", timeout=PATIENCE) as answer:
                assert answer.status == 200
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["id"] == "a"
