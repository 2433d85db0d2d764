"""LangChain's `ChatOpenAI` and `OpenAI`, unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.client_runs import needs, run_script
from tests.support.running_server import ARGUMENTS, RunningServer

pytestmark = [pytest.mark.slow, needs("langchain")]
MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat sat"}]
NAMED = ARGUMENTS | {"title": "measure", "description": "a length"}


def test_every_kind_of_call_returns_the_decoders_text(server: RunningServer, decoder: SpeculativeDecoder) -> None:
    plain = decoder.using("none", num_draft_tokens="auto")
    params = SamplingParams(max_tokens=60, seed=4, temperature=0.8, logit_bias={1: -50})  # without an end token
    expected = plain.generate(MESSAGES, params).text
    bodies = {
        "messages": MESSAGES,
        "options": {"max_tokens": 60, "temperature": 0.8, "seed": 4, "logit_bias": {"1": -50}},
        "form": NAMED,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": NAMED}}],
    }
    answers: dict[str, Any] = run_script("langchain", "langchain_calls.py", server.url, "tiny", json.dumps(bodies))
    assert {answers["whole"], answers["stream"], answers["async"], *answers["batch"]} == {expected}
    assert answers["usage"] == answers["stream_usage"] == answers["logprobs"] == 60 and answers["reason"] == "length"
    assert set(answers["form"]) == {"x", "unit"} and answers["form"]["unit"] in ("m", "km")
    (call,) = answers["call"]
    assert call["name"] == "add" and set(call["args"]) == {"x", "unit"}
    assert answers["after_call"] and answers["after_call"] != expected  # the template has shown the call and its answer
    assert answers["completion"] == plain.generate("A heron", SamplingParams(max_tokens=20), chat=False).text
    assert answers["errors"] == {"top_p": 400, "max_completion_tokens": 400}
