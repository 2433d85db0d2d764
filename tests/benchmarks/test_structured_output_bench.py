"""The benchmark of structured output: texts that are valid and those of plain decoding, and it notices others."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import structured_output
from random_schemas import random_schema


def test_random_schemas_are_schemas_and_of_many_kinds() -> None:
    texts = [repr(random_schema(seed)) for seed in range(300)]
    for seed in range(300):
        jsonschema.Draft202012Validator.check_schema(random_schema(seed))
    for word in ("$ref", "oneOf", "anyOf", "allOf", "enum", "const", "pattern", "format", "multipleOf", "prefixItems"):
        assert any(word in text for text in texts), word


def test_a_small_run_on_the_toy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "toy", "--schemas", "4", "--drafters", "suffix", "--max-tokens", "80"]
    assert structured_output.main(arguments) == 0
    out = capsys.readouterr().out
    assert "toy: 4 schemas" in out and out.count("same as plain 4/4") == 3


def test_an_invalid_text_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = lambda text, schema: False  # noqa: E731
    monkeypatch.setattr(structured_output, "is_valid", wrong)
    arguments = ["--target", "toy", "--schemas", "2", "--drafters", "suffix", "--max-tokens", "120"]
    assert structured_output.main(arguments) == 1
