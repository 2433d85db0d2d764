"""The benchmark of structured output: its texts are valid and those of plain decoding, and it detects any others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import structured_output
from random_schemas import random_schema

pytestmark = pytest.mark.exhaustive


def test_random_schemas_are_valid_and_of_many_kinds() -> None:
    texts = [repr(random_schema(seed)) for seed in range(300)]
    for seed in range(0, 300, 6):
        jsonschema.Draft202012Validator.check_schema(random_schema(seed))
    for word in ("$ref", "oneOf", "anyOf", "allOf", "enum", "const", "pattern", "format", "multipleOf", "prefixItems"):
        assert any(word in text for text in texts), word


def test_constrained_texts_of_the_toy_equal_plain_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "toy", "--schemas", "4", "--drafters", "suffix", "--max-tokens", "80"]
    assert structured_output.main(arguments) == 0
    out = capsys.readouterr().out
    assert "toy: 4 schemas" in out and out.count("same as plain 4/4") == 3


def test_an_invalid_text_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = lambda *values: False  # noqa: E731
    monkeypatch.setattr(structured_output, "is_valid", wrong)
    arguments = ["--target", "toy", "--schemas", "2", "--drafters", "suffix", "--max-tokens", "120"]
    assert structured_output.main(arguments) == 1


def test_schemas_of_a_suite_are_read_from_all_files_and_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    for name, schemas in {"a": [kept, True], "b": [{"unevaluatedItems": False}]}.items():
        groups = [{"description": name, "schema": schema, "tests": []} for schema in schemas]
        (tmp_path / f"{name}.json").write_text(json.dumps(groups))
    arguments = ["--target", "toy", "--suite", str(tmp_path), "--schemas", "9", "--drafters", "suffix"]
    assert structured_output.main(arguments) == 0
    out = capsys.readouterr().out
    assert "toy: 1 schemas, 1 refused" in out and "unevaluatedItems" in out
    with pytest.raises(SystemExit, match="no schemas there"):
        structured_output.main([*arguments[:3], str(tmp_path / "none")])


@pytest.mark.parametrize(("text", "valid"), [("2024-02-29", True), ("0000-02-29", True), ("2023-02-29", False)])
def test_dates_are_checked_by_rfc_3339(text: str, valid: bool) -> None:
    assert structured_output.is_valid(json.dumps(text), {"format": "date"}) is valid
