"""litellm, unchanged, as its `hosted_vllm` provider."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.client_runs import needs, run_script
from tests.support.running_server import ARGUMENTS, RunningServer

pytestmark = [pytest.mark.slow, needs("litellm")]
MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat sat"}]


def test_every_kind_of_call_returns_the_decoders_text(server: RunningServer, decoder: SpeculativeDecoder) -> None:
    plain = decoder.using("none", num_draft_tokens="auto")
    expected = plain.generate(
        MESSAGES, SamplingParams(max_tokens=60, seed=4, temperature=0.8, logit_bias={1: -50})
    ).text  # without an end token
    bodies = {
        "asked": {"messages": MESSAGES, "max_tokens": 60, "temperature": 0.8, "seed": 4, "logit_bias": {"1": -50}},
        "prompt": "A heron",
        "predicted": expected,
        "form": {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS, "strict": True}},
        "tools": [{"type": "function", "function": {"name": "stop_now"}}],  # litellm removes additionalProperties
    }
    answers: dict[str, Any] = run_script("litellm", "litellm_calls.py", server.url, "tiny", json.dumps(bodies))
    assert answers["whole"] == answers["stream"] == answers["async"] == answers["predicted"] == expected
    assert answers["reason"] == "length" and answers["usage"] == answers["stream_usage"] == 60
    assert answers["accepted"] > 0 and len(answers["logprobs"]) == 60
    assert set(json.loads(answers["form"])) == {"x", "unit"}
    assert [(call["name"], json.loads(call["arguments"])) for call in answers["call"]] == [("stop_now", {})]
    assert answers["call_reason"] == "tool_calls"
    assert answers["completion"] == plain.generate("A heron", SamplingParams(max_tokens=20), chat=False).text
    assert answers["errors"] == {
        "bad field": "BadRequestError",
        "too long": "ContextWindowExceededError",
    }
