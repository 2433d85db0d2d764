"""What a chat with a server asks for: fields that servers know, or one line that names the flag."""

from __future__ import annotations

import json

import pytest

from slipstream import Constraint, SamplingParams, UsageError
from slipstream.apps.chat.remote_chat import RemoteChat, request_fields
from tests.support.chat_fakes import Recorder

DEFAULTS = {"temperature": 0.0, "max_tokens": 200}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_OPENAI_HAS_IT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        (Constraint(json_schema=SCHEMA), {"response_format": AS_OPENAI_HAS_IT}),
        (Constraint(json_schema=json.dumps(SCHEMA)), {"response_format": AS_OPENAI_HAS_IT}),
        (Constraint(json_object=True), {"response_format": {"type": "json_object"}}),
        (Constraint(regex="[ab]+"), {"structured_outputs": {"regex": "[ab]+"}}),
        (Constraint(choice=("a", "b")), {"structured_outputs": {"choice": ["a", "b"]}}),
        (Constraint(grammar='start: "a"'), {"structured_outputs": {"grammar": 'start: "a"'}}),
    ],
)
def test_a_constraint_becomes_a_field_that_servers_know(constraint: Constraint, fields: dict[str, object]) -> None:
    asked = request_fields(SamplingParams(constraint=constraint))
    assert asked == DEFAULTS | fields and json.dumps(asked)


def test_a_prediction_is_written_as_openai_has_it() -> None:
    asked = request_fields(SamplingParams(prediction="def f():"))
    assert asked == DEFAULTS | {"prediction": {"type": "content", "content": "def f():"}}


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (SamplingParams(constraint=Constraint(json_object=True, whitespace="spaced")), "--whitespace 'spaced' with"),
        (SamplingParams(constraint=Constraint(grammar="start: @a", schemas={"a": SCHEMA})), "--grammar that names"),
        (SamplingParams(prediction=[1, 2]), "--prediction of token ids with --url; allowed: a text"),
    ],
)
def test_what_no_request_can_say_is_refused_before_anything_is_sent(params: SamplingParams, told: str) -> None:
    with pytest.raises(UsageError, match=f"^{told}"):
        RemoteChat("http://127.0.0.1:9", Recorder(), params)
