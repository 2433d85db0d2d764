"""Metrics, the engine's state, tokens and the other small endpoints."""

from __future__ import annotations

import json
import logging
from importlib import resources
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.apps.server.server_metrics import HISTOGRAMS
from tests.support.running_server import PATIENCE, Gate, RunningServer, running_server


def samples(server: RunningServer) -> dict[str, float]:
    """Every sample, summed over its labels."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


def test_metrics_have_vllms_names_and_add_up(server: RunningServer) -> None:
    before = samples(server)
    answers = [server.complete(temperature=0, max_tokens=50, seed=i).json() for i in range(3)]
    now = samples(server)
    grown = {name: now[name] - before.get(name, 0) for name in now}
    drafting = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert grown["vllm:generation_tokens_total"] == sum(a["usage"]["completion_tokens"] for a in answers) == 150
    assert grown["vllm:prompt_tokens_total"] == 21 == grown["vllm:prefix_cache_queries_total"]
    assert grown["vllm:request_success_total"] == 3
    assert (
        grown["vllm:spec_decode_num_draft_tokens_total"] == sum(counts["num_draft_tokens"] for counts in drafting) > 0
    )
    accepted = sum(counts["num_accepted_draft_tokens"] for counts in drafting)
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
    assert grown["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
    assert grown["slipstream:accepted_by_source_total"] == accepted
    assert grown["vllm:time_to_first_token_seconds_count"] == grown["vllm:e2e_request_latency_seconds_count"] == 3
    assert grown["slipstream:rounds_total"] == sum(counts["num_spec_steps"] for counts in drafting)
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= set(now)
    for name in HISTOGRAMS:
        assert f"{name}_count" in now, name
    assert (
        'http_requests_total{handler="/v1/completions",method="POST",status="200"}' in server.http.get("/metrics").text
    )
    assert 'model_name="toy"' in server.http.get("/metrics").text


def test_timings_have_the_fields_of_llama_cpp(server: RunningServer) -> None:
    answer = server.complete("never seen before", max_tokens=9).json()
    timings = answer["timings"]
    assert timings["prompt_n"] + answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 17
    assert timings["predicted_n"] == 9 and timings["predicted_ms"] >= 0 <= timings["prompt_ms"]


@pytest.mark.slow
def test_the_state_shows_running_rows() -> None:
    gate = Gate()
    with running_server(lambda: gate.load(max_batch_size=1)) as server:
        body = {"prompt": "A heron", "max_tokens": 9, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            assert gate.reached.wait(PATIENCE)
            server.wait_until(lambda: server.service.num_waiting == 0)
            (lane,) = server.http.get("/v1/slipstream/state").json()["running"]
            assert lane["lane"] == 0 == lane["tokens"] and lane["prompt_tokens"] == 7 and lane["max_tokens"] == 9
            gate.opened.set()
            stream.read()
        state = server.http.get("/v1/slipstream/state").json()
        assert state["running"] == [] and state["places"] == {"taken": 0, "most": 1}
        assert state["model"] == "toy" and state["drafter"] == "suffix" and state["tokens_per_second"] > 0
        assert abs(sum(state["round_shares"].values()) - 1) < 1e-6
        assert state["cache"]["prompt_tokens"] == 7


def test_the_state_is_streamed_as_events(server: RunningServer) -> None:
    with server.http.stream("GET", "/v1/slipstream/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
    assert json.loads(line[6:]).keys() == server.http.get("/v1/slipstream/state").json().keys()


def test_tokenize_and_detokenize_mirror_each_other(server: RunningServer) -> None:
    tokenized = server.http.post("/tokenize", json={"prompt": "héron", "add_special_tokens": False}).json()
    assert tokenized == {"tokens": [*"héron".encode()], "count": 6, "max_model_len": 4096}
    assert server.http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": "héron"}
    lines = {"messages": [{"role": "user", "content": text} for text in ("a", "b")], "add_special_tokens": False}
    # without a chat template, messages are joined by newlines
    assert server.http.post("/tokenize", json=lines).json()["tokens"] == [*b"a\nb"]
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/detokenize", {"tokens": [257]}),
        ("/detokenize", {"tokens": ["x"]}),
    ):
        assert server.http.post(path, content=json.dumps(body)).status_code == 400
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<end>" and info["eos_token_id"] == 256


def test_the_small_endpoints_answer(server: RunningServer) -> None:
    assert server.http.get("/health").json() == {"status": "ready"} == server.http.get("/live").json()
    assert set(server.http.get("/version").json()) == {"version"}
    card = server.http.get("/v1/models/toy").json()
    assert card["id"] == "toy" and card["max_model_len"] == 4096
    assert card == server.http.get("/v1/models").json()["data"][0]


def test_the_log_has_numbers_but_no_texts(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slipstream.server"):
        server.complete("my secret prompt\n\x1b[31m", max_tokens=5)
        server.complete("x", **{"evil\nfield\x1b": 1})
    lines = [record.getMessage() for record in caplog.records if record.name == "slipstream.server"]
    assert any("prompt_tokens=22" in line and "tokens=5" in line for line in lines)
    assert not any("secret" in line or "\x1b" in line or "\n" in line for line in lines)


def test_the_dashboard_queries_only_metrics_that_exist(server: RunningServer) -> None:
    text = (resources.files("slipstream") / "data" / "grafana_dashboard.json").read_text()
    board: dict[str, Any] = json.loads(text)
    page = server.http.get("/metrics").text
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {
        word
        for query in asked
        for word in query.replace("(", " ").replace("{", " ").replace("[", " ").split()
        if ":" in word
    }
    assert len(names) > 12
    for name in names:
        assert f"# TYPE {name.removesuffix('_bucket').removesuffix('_sum').removesuffix('_count')} " in page, name


def test_the_log_has_the_traceback_of_errors_outside_of_answers(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(totals: Any) -> Any:
        raise KeyError("lane")

    monkeypatch.setattr(server.service.engine_status, "state", failing)
    answer = server.http.get("/v1/slipstream/state")
    assert answer.status_code == 500 and "lane" not in answer.text
    record, line = [record for record in caplog.records if record.name == "slipstream.server"]
    assert "status=500" in line.getMessage() and not line.exc_info
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)
