"""Anthropic's and Ollama's own clients, unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from tests.support import tiny_models
from tests.support.chat_templates import TEMPLATES
from tests.support.client_runs import needs, run_script
from tests.support.running_server import ARGUMENTS, running_server

pytestmark = [pytest.mark.slow, needs("sdks")]


def test_messages_and_ollamas_calls_return_the_decoders_text() -> None:
    inner = tiny_models.byte_tokenizer(TEMPLATES["no tools"])
    model = tiny_models.fresh("llama", vocab_size=len(inner), max_position_embeddings=4096, eos_token_id=1)
    decoder = SpeculativeDecoder(model, tokenizer=inner, drafter="suffix", num_draft_tokens=4, acceptance="match")
    question = "the cat sat on the mat"
    expected = decoder.generate([{"role": "user", "content": question}], max_tokens=30, temperature=0).text
    with running_server(decoder.using, served_model_name="tiny") as server:
        answers: dict[str, Any] = run_script(
            "sdks", "sdk_calls.py", server.url, "tiny", question, json.dumps(ARGUMENTS)
        )
    texts = [answers[name] for name in ("whole", "stream", "chat", "chunks", "generated")]
    assert texts == [expected] * 5 and answers["final"] == [expected, "max_tokens", 30]
    name, arguments = answers["call"]
    assert name == "measure" and set(arguments) == {"x", "unit"} and answers["later"] == "assistant"
    assert answers["count"] > 300 and "prompt is too long: " in answers["error"]
    assert answers["offered"] == "length" and answers["models"] == ["tiny"] and answers["loaded"] == [4096]
    assert answers["capabilities"] == ["completion", "tools"]
