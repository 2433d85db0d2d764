"""A draft model that costs as much as its target is named in the log when it is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from tests.support.tiny_models import fresh, shared


def warnings_of(draft: Any, caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    caplog.clear()
    SpeculativeDecoder(shared("llama"), draft, reproducible=False, **settings)
    return [record.getMessage() for record in caplog.records if "hardly saves time" in record.getMessage()]


def test_a_draft_model_as_large_as_its_target_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(shared("llama"), caplog)
    assert warning.startswith("draft model 'LlamaForCausalLM' hardly saves time: it is as large as its target, with ")
    (warning,) = warnings_of(fresh("llama", num_hidden_layers=3), caplog)
    assert "it is larger than its target, with about " in warning


def test_a_smaller_draft_model_and_one_in_fewer_bits_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(fresh("llama", num_hidden_layers=1), caplog) == []
    assert warnings_of(fresh("llama"), caplog, draft_dtype="int4") == []


def test_a_later_draft_model_is_warned_of_as_well(caplog: pytest.LogCaptureFixture) -> None:
    decoder = SpeculativeDecoder(shared("llama"), reproducible=False)
    decoder.with_draft(shared("llama"))
    assert "hardly saves time" in caplog.text
