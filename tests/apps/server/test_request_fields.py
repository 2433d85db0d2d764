"""A body of a few MiB costs what it costs to parse, however wrong it is."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from slipstream.apps.server.engine_routes import ReplayFields
from slipstream.apps.server.error_objects import validation_error
from slipstream.apps.server.request_fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields

WRONG = [None] * 20_000
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionFields, {"prompt": WRONG}, "prompt"),
        (CompletionFields, {"prompt": [WRONG]}, "prompt"),
        (CompletionFields, {"prompt": [1, *WRONG]}, "prompt"),
        (CompletionFields, {"prompt": "x", "stop": WRONG}, "stop"),
        (CompletionFields, {"prompt": "x", "stop_token_ids": WRONG}, "stop_token_ids"),
        (CompletionFields, {"prompt": "x", "bad_words": WRONG}, "bad_words"),
        (CompletionFields, {"prompt": "x", "allowed_token_ids": WRONG}, "allowed_token_ids"),
        (CompletionFields, {"prompt": "x", "prediction": {"type": "content", "content": WRONG}}, "prediction"),
        (CompletionFields, {"prompt": "x", "logit_bias": {str(n): None for n in range(20_000)}}, "logit_bias"),
        (ChatFields, {"messages": WRONG}, "messages"),
        (ChatFields, {"messages": [{"role": "user", "content": WRONG}]}, "messages"),
        (ChatFields, {"messages": [{"role": "assistant", "tool_calls": WRONG}]}, "messages"),
        (ChatFields, {"messages": HI, "tools": WRONG}, "tools"),
        (TokenizeFields, {"messages": WRONG}, "messages"),
        (DetokenizeFields, {"tokens": WRONG}, "tokens"),
        (ReplayFields, {"request": {}, "token_ids": WRONG}, "token_ids"),
    ],
)
def test_a_list_is_read_up_to_its_first_mistake(kind: type[BaseModel], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    errors = found.value.errors()
    assert len(errors) < 20
    told = validation_error(errors)
    assert (told.param or "").startswith(param) and "\n" not in told.message
