"""An operator's path: settings from a file and the environment, keys read again, a drain, and a log that is JSON."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from slipstream.apps.cli.serve import MONITORING
from tests.support.command_line import run
from tests.support.processes import PATIENCE, environment, started
from tests.support.running_server import running_server

OLD, NEW = "the-old-key-of-ann", "the-new-key-of-ann"
SETTINGS = """
model = "toy"
port = 0
drafter = "suffix"
api_key_file = "{folder}/keys"
drain_timeout = 200
log_level = "debug"
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_server_is_configured_reloaded_drained_and_logged(tmp_path: Path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "serve.toml"
    keys.write_text(f"ann:{OLD}\n")
    config.write_text(SETTINGS.format(folder=tmp_path))
    variables = environment() | {"SLIPSTREAM_LOG_FORMAT": "json", "SLIPSTREAM_SERVED_MODEL_NAME": "birds"}
    command = ("-m", "slipstream", "serve", "--config", str(config))
    lines: list[dict[str, Any]] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    hears_hangups = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    with started(*command, env=variables, preexec_fn=hears_hangups, **pipes) as server:
        assert server.stderr is not None and server.stdout is not None

        def read(pattern: str) -> dict[str, Any]:
            """The next line of the log whose message has this pattern."""
            for line in server.stderr or ():
                lines.append(json.loads(line))
                if re.search(pattern, lines[-1]["message"]):
                    return lines[-1]
            raise AssertionError(f"the log ended without {pattern!r}")

        url = read(" serves birds at ")["message"].split()[-1]

        def ask(key: str, **fields: Any) -> Iterator[str]:
            body = {"prompt": "my secret", "temperature": 0} | fields
            headers = {"authorization": f"Bearer {key}"}
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=PATIENCE
            ) as answer:
                yield str(answer.status_code)
                yield from answer.iter_lines()

        status, text = ask(OLD, max_tokens=12)
        answer = json.loads(text)["choices"][0]["text"]
        assert status == "200" and json.loads(text)["model"] == "birds"
        request = read("^request$")
        assert datetime.fromisoformat(request["time"]).utcoffset() is not None and request["level"] == "info"
        expected = {"method": "POST", "path": "/v1/completions", "status": 200, "model": "birds", "key": "ann"}
        assert expected.items() <= request.items() and request["tokens"] == 12
        assert request["tokens_per_round"] >= 1 and 0 < request["first_token_seconds"] <= request["seconds"]

        keys.write_text("short\n")
        server.send_signal(signal.SIGHUP)
        refused = read("the earlier keys stay in use")
        assert refused["level"] == "error" and "line 1: a key of 5 characters" in refused["message"]
        assert next(ask(OLD, max_tokens=1)) == "200"
        keys.write_text(f"ann:{NEW}\nbob:key-of-bob-1\n")
        server.send_signal(signal.SIGHUP)
        assert read("is read again")["message"] == "--api-key-file 'keys' is read again: 2 keys"
        assert (next(ask(OLD)), next(ask(NEW, max_tokens=1))) == ("401", "200")
        assert httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE) as connection:
            connection.sendall(b"no request\r\n\r\n")
            assert read("Invalid HTTP request")["level"] == "warning"  # a line of uvicorn's

        stream = ask(NEW, max_tokens=800, ignore_eos=True, num_draft_tokens=0, stream=True)
        assert next(stream) == "200" and next(stream).startswith("data: ")
        server.send_signal(signal.SIGTERM)
        read("shutting down")
        assert next(ask(NEW, max_tokens=1)) == "503"
        assert [line for line in stream if line][-1] == "data: [DONE]"
        log = server.stderr.read()
        assert server.wait(PATIENCE) == 0 and not server.stdout.read()
    lines += map(json.loads, log.splitlines())
    assert all(line["time"] and line["level"] in ("debug", "info", "warning", "error") for line in lines)
    requests = [(line["path"], line["status"], line["level"]) for line in lines if line["message"] == "request"]
    for request in (
        ("/v1/completions", 401, "info"),
        ("/health", 200, "debug"),
        ("/v1/completions", 503, "warning"),
    ):
        assert request in requests
    text = json.dumps(lines)
    assert not any(part in text for part in (OLD, NEW, "secret", str(tmp_path), answer.strip()))


@pytest.mark.parametrize("name", MONITORING)
def test_files_for_monitoring_are_printed(name: str, capsys, monkeypatch) -> None:
    code, out, errors = run(capsys, monkeypatch, "serve", "--print", name)
    assert code == 0 and not errors
    assert out == (resources.files("slipstream") / "data" / MONITORING[name]).read_text()
    assert run(capsys, monkeypatch, "serve", "--print", "dashbord")[2].endswith("did you mean 'dashboard'?\n")


def test_alerts_and_the_scrape_example_name_what_the_server_has() -> None:
    alerts, scrape = (
        yaml.safe_load((resources.files("slipstream") / "data" / MONITORING[name]).read_text())
        for name in ("alerts", "scrape")
    )
    (job,) = scrape["scrape_configs"]
    assert job["job_name"] == "slipstream" and job.get("metrics_path", "/metrics") == "/metrics"
    with running_server() as server:
        server.complete()
        page = server.http.get("/metrics").text
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    names = {"slipstream:rejected", "slipstream:replays", "vllm:time_to_first_token_seconds", "http_requests"}
    for rule in rules:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
        assert 'up{job="slipstream"}' in rule["expr"] or any(name in rule["expr"] for name in names), rule
    for name in names:
        assert f"# TYPE {name}" in page and any(name in rule["expr"] for rule in rules)
