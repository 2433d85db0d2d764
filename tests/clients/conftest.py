"""A small model with a chat template and tools, and a server of it, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream import SpeculativeDecoder
from tests.support import tiny_models
from tests.support.running_server import RunningServer, running_server

TEMPLATE = (
    "{% for t in tools or [] %}tool:{{ t['function']['name'] }} <tool_call>.{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}."
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}.{% endfor %}{% endfor %}a:"
)
EXTRA = ["\n", *'<>_{}"/[]-0123456789']


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    tokenizer = tiny_models.tokenizer(EXTRA, TEMPLATE)
    model = tiny_models.fresh("llama", vocab_size=len(tokenizer), eos_token_id=1)
    return SpeculativeDecoder(model, tokenizer=tokenizer, drafter="suffix", num_draft_tokens=4, acceptance="match")


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[RunningServer]:
    with running_server(lambda: decoder.using(), served_model_name="tiny") as running:
        yield running
