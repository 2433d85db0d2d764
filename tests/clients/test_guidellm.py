"""guidellm's load on a small model, offline: every request is answered in full, and its counts are the server's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from tests.support.client_runs import needs, run_client
from tests.support.running_server import RunningServer

pytestmark = [pytest.mark.slow, needs("guidellm")]
REQUESTS = 6


def test_every_request_of_a_load_is_answered(
    server: RunningServer, decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    folder, report = tmp_path / "tokenizer", tmp_path / "report.json"
    tokenizer: Any = decoder.tokenizer
    tokenizer.inner.save_pretrained(folder)
    run_client(
        "guidellm",
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={server.url}",
        "--profile=kind=concurrent,streams=2",
        f"--constraint=kind=max_requests,count={REQUESTS}",
        f"--tokenizer=kind=huggingface_auto,model={folder}",
        "--data=kind=synthetic_text,prompt_tokens=16,output_tokens=12",
        f"--output=kind=json,path={report}",
        "--disable-console",
        folder=tmp_path,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    successful = benchmark["requests"]["successful"]
    assert len(successful) == REQUESTS and not benchmark["requests"]["errored"]
    assert {request["output_metrics"]["text_tokens"] for request in successful} == {12}
    assert (
        f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {12.0 * REQUESTS}'
        in server.http.get("/metrics").text
    )
