"""litellm, unchanged, as its `hosted_vllm` provider."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.client_runs import needs, run_script
from tests.support.running_server import RunningServer

pytestmark = [pytest.mark.slow, needs("litellm")]
MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat sat"}]
ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}


def test_every_kind_of_call_returns_the_decoders_text(server: RunningServer, decoder: SpeculativeDecoder) -> None:
    plain = decoder.using("none", num_draft_tokens="auto")
    expected = plain.generate(
        MESSAGES, SamplingParams(max_tokens=60, seed=4, temperature=0.8, logit_bias={1: -50})
    ).text  # without an end
    given = {
        "asked": {"messages": MESSAGES, "max_tokens": 60, "temperature": 0.8, "seed": 4, "logit_bias": {"1": -50}},
        "prompt": "A heron",
        "predicted": expected,
        "form": {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS, "strict": True}},
        "tools": [{"type": "function", "function": {"name": "stop_now"}}],  # litellm takes additionalProperties out
    }
    found: dict[str, Any] = run_script("litellm", "litellm_calls.py", server.url, "tiny", json.dumps(given))
    assert found["whole"] == found["stream"] == found["async"] == found["predicted"] == expected
    assert found["reason"] == "length" and found["usage"] == found["stream_usage"] == 60
    assert found["accepted"] > 0 and len(found["logprobs"]) == 60
    assert set(json.loads(found["form"])) == {"x", "unit"}
    assert [(one["name"], json.loads(one["arguments"])) for one in found["call"]] == [("stop_now", {})]
    assert found["call_reason"] == "tool_calls"
    assert found["completion"] == plain.generate("A heron", SamplingParams(max_tokens=20), chat=False).text
    assert found["errors"] == {
        "no such model": "NotFoundError",
        "bad field": "BadRequestError",
        "too long": "ContextWindowExceededError",
    }
