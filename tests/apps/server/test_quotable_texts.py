"""What a tool returned is drafted where a call of the model repeats it, as an agent's model does with files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.apps.server import request_reading
from slipstream.apps.server.request_reading import quotable_texts
from slipstream.apps.server.schemas import ChatFields
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support.chat_templates import FAMILIES, TEMPLATES
from tests.support.markers import subcases
from tests.support.running_server import running_server
from tests.support.scripted_model import scripted_decoder
from tests.support.tiny_models import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}]
CONTENT = 'bird = "heron"\n\n\tcolor = "grey"'
NUMBERED = '     1\tbird = "heron"\n     2\t\n     3\t\tcolor = "grey"'


def request(result: Any, **fields: Any) -> ChatFields:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Write it again."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    return ChatFields.model_validate({"messages": turns, "tools": TOOLS} | fields)


def texts(fields: ChatFields, template: str = TEMPLATES["plain"]) -> list[str]:
    tokenizer = HFTokenizer(byte_tokenizer(template))
    return [tokenizer.decode(ids) for ids in quotable_texts(fields, tokenizer)]


@subcases(
    "result",
    [
        CONTENT,
        NUMBERED,
        '1\tbird = "heron"\n2\t\n3\t\tcolor = "grey"',  # Claude Code's
        '     1→bird = "heron"\n     2→\n     3→\tcolor = "grey"',
        '1: bird = "heron"\n2: \n3: \tcolor = "grey"',  # opencode's
        '00001| bird = "heron"\n00002| \n00003| \tcolor = "grey"',
        json.dumps([{"query": "notes.py", "result": '1 | bird = "heron"\n2 | \n3 | \tcolor = "grey"'}]),  # Cline's
        [{"type": "text", "text": NUMBERED}],
    ],
)
def test_results_are_written_as_calls_hold_them(result: Any) -> None:
    assert texts(request(result)) == texts(request(result), TEMPLATES["no tools"]) == [json.dumps(CONTENT)]
    assert texts(request(result), FAMILIES["Qwen 3.5"]) == [CONTENT]  # between tags nothing is escaped


def test_only_results_that_a_call_can_repeat_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts(request(CONTENT, tools=None)) == texts(request(CONTENT, tool_choice="none")) == []
    two = request("bird")
    two.messages.append(request("cat").messages[-1])
    assert texts(two) == ['"cat"', '"bird"']
    assert texts(request('["a\\n\\ud800"]')) == [json.dumps("a\n?")]
    assert texts(request("[oops\n")) == [json.dumps("[oops\n")]
    monkeypatch.setattr(request_reading, "MAX_QUOTABLE", 5)
    assert texts(two) == ['"cat"', '"bi"']  # the latest first


def test_a_file_that_is_written_again_takes_fewer_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'bird_{number} = "{number * number * 7919}"' for number in range(30)]
    numbered = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, 1))
    content = "\n".join(lines).replace("bird_9", "heron")
    call = json.dumps({"name": "write", "arguments": {"content": content}})
    answer = f"<tool_call>\n{call}\n</tool_call>"
    tokenizer = HFTokenizer(byte_tokenizer(TEMPLATES["plain"]))
    decoder = scripted_decoder(tokenizer, "<|assistant|>\n", lambda prompt: answer, 1 << 14)
    body = request(numbered, max_tokens=4000, temperature=0).model_dump(exclude_none=True)
    counts = []
    with running_server(lambda: decoder, max_model_len=1 << 14) as server:
        for most in (request_reading.MAX_QUOTABLE, 0):
            monkeypatch.setattr(request_reading, "MAX_QUOTABLE", most)
            salted = body | {"cache_salt": str(most), "num_draft_tokens": 8}  # past outputs are not drafted
            report = server.http.post("/v1/chat/completions", json=salted).json()
            (made,) = report["choices"][0]["message"]["tool_calls"]
            assert json.loads(made["function"]["arguments"])["content"] == content
            counts.append(report["metrics"]["speculative_decoding"]["num_spec_steps"])
    assert counts[0] < 0.7 * counts[1]
