"""An operator's path: a unit file, settings from a file, two models, keys read again, a drain, a log, alerts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from slipstream import SpeculativeDecoder
from slipstream.apps.cli.serve import MONITORING
from tests.support.command_line import run
from tests.support.processes import PATIENCE, environment, started
from tests.support.running_server import running_server, toy
from tests.support.server_storm import Storm, weak

OLD, NEW = "the-old-key-of-ann", "the-new-key-of-ann"
SETTINGS = """
port = 0
greedy = true
drafter = "suffix"
max_model_len = 2048
api_key_file = "{folder}/keys"
drain_timeout = 200
log_level = "debug"

[models.birds]
model = "toy"

[models.fish]
target = "toy:2"
served_model_name = ["trout"]
max_model_len = 512
num_draft_tokens = 3
"""
UNIT = Path(__file__).parents[2] / "docs" / "operate.md"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_server_is_configured_reloaded_drained_and_logged(tmp_path: Path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "serve.toml"
    keys.write_text(f"ann:{OLD}\n")
    config.write_text(SETTINGS.format(folder=tmp_path))
    unit = dict(
        line.split("=", 1) for line in UNIT.read_text().split("```ini\n[Service]\n")[1].split("\n```")[0].split("\n")
    )
    variables = environment() | dict(pair.split("=") for pair in unit["Environment"].split())
    variables["SLIPSTREAM_MODELS"] = os.environ["SLIPSTREAM_MODELS"]
    program, *words = unit["ExecStart"].split()
    assert program.endswith("/bin/slipstream") and words[-1] == "/etc/slipstream/serve.toml"
    command = ("-m", "slipstream", *words[:-1], str(config))
    lines: list[dict[str, Any]] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(*command, env=variables, **pipes) as server:

        def reload() -> None:
            subprocess.run(unit["ExecReload"].replace("$MAINPID", str(server.pid)).split(), check=True)

        assert server.stderr is not None and server.stdout is not None

        def read(pattern: str) -> dict[str, Any]:
            """The next line of the log whose message has this pattern."""
            for line in server.stderr or ():
                lines.append(json.loads(line))
                if re.search(pattern, lines[-1]["message"]):
                    return lines[-1]
            raise AssertionError(f"the log ended without {pattern!r}")

        url = read(" serves birds, fish at ")["message"].split()[-1]

        def ask(key: str, **fields: Any) -> Iterator[str]:
            body = {"model": "birds", "prompt": "my secret"} | fields
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

        status, text = ask(OLD, model="trout", max_tokens=12)
        assert status == "200" and json.loads(text)["model"] == "fish" and read("^request$")["model"] == "fish"
        for model, text_of_model in (("toy", answer), ("toy:2", json.loads(text)["choices"][0]["text"])):
            decoder = SpeculativeDecoder(model, drafter="none")
            plain = decoder.generate("my secret", max_tokens=12, temperature=0, chat=False)
            assert text_of_model == plain.text
        headers = {"authorization": f"Bearer {OLD}"}
        models = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False, timeout=PATIENCE).json()["data"]
        assert {card["id"]: card["max_model_len"] for card in models} == {"birds": 2048, "fish": 512, "trout": 512}

        keys.write_text("short\n")
        reload()
        refused = read("the earlier keys stay in use")
        assert refused["level"] == "error" and "line 1: a key of 5 characters" in refused["message"]
        assert next(ask(OLD, max_tokens=1)) == "200"
        keys.write_text(f"ann:{NEW}\nbob:key-of-bob-1\n")
        reload()
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


def rules_of(alerts: Any) -> list[dict[str, Any]]:
    return [rule for group in alerts["groups"] for rule in group["rules"]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_a_storm_fires_the_alerts_that_it_should(tmp_path: Path) -> None:
    text = (resources.files("slipstream") / "data" / MONITORING["alerts"]).read_text()
    with running_server(lambda: weak(toy(max_batch_size=1)), max_queued_requests=1) as server:
        pages = [server.http.get("/metrics").text]
        storm = Storm(server.url, 40, seed=1, kinds={"whole": 3, "fault": 1}).run()
        pages.append(server.http.get("/metrics").text)
    assert storm.outcomes["refused"] and storm.outcomes["fault"]
    before, after = (
        {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        for families in map(text_string_to_metric_families, pages)
    )
    server_labels = 'job="slipstream", instance="a:1"'
    series = [{"series": f"up{{{server_labels}}}", "values": "1x22 0x8"}]  # it ends after the storm of 20 minutes
    for (name, *labels), value in after.items():
        written = ", ".join([server_labels, *(f'{label}="{held}"' for label, held in labels)])
        start = before.get((name, *labels), 0.0)
        series.append({"series": f"{name}{{{written}}}", "values": f"{start:f}{(value - start) / 20:+f}x20"})

    def fired(rule: dict[str, Any], minute: int, **labels: str) -> dict[str, Any]:
        labels = {"instance": "a:1"} | labels | rule["labels"]
        summary = rule["annotations"]["summary"].replace("{{ $labels.instance }}", "a:1")
        expected = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}] if minute else []
        return {"eval_time": f"{minute or 20}m", "alertname": rule["alert"], "exp_alerts": expected}

    rules = {rule["alert"]: rule for rule in rules_of(yaml.safe_load(text))}
    alerts = [
        fired(rules.pop("SlipstreamFails"), 20),
        fired(rules.pop("SlipstreamRefuses"), 20, model_name="toy"),
        fired(rules.pop("SlipstreamDown"), 28, job="slipstream"),
        *(fired(rule, 0) for rule in rules.values()),  # which stay silent
    ]
    (tmp_path / "alerts.yml").write_text(text)
    case = {"interval": "1m", "input_series": series, "alert_rule_test": alerts}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": [case]}))
    checked = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0 and "SUCCESS" in checked.stdout + checked.stderr, checked.stdout + checked.stderr


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
    rules = rules_of(alerts)
    names = {"slipstream:rejected", "slipstream:replays", "vllm:time_to_first_token_seconds", "http_requests"}
    for rule in rules:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
        assert 'up{job="slipstream"}' in rule["expr"] or any(name in rule["expr"] for name in names), rule
    for name in names:
        assert f"# TYPE {name}" in page and any(name in rule["expr"] for rule in rules)
