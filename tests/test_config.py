"""Decoder settings: what is refused, and that JSON keeps every field."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import Draft, SpeculativeDecoder, UsageError
from slipstream.config import DecoderConfig
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.draft_length.policies import Fixed

IMPOSSIBLE: dict[str, list[Any]] = {
    "num_draft_tokens": ["four", "", None, -1, 1.0, True, False, [4]],
    "dtype": ["fp33", "", None, 32, "float64"],
    "fast": ["yes", None, 1, 0, ""],
    "reproducible": ["yes", None, 1, 0, ""],
    "max_batch_size": [0, -1, "8", None, 1.0, True],
    "load_options": [None, "{}", [("a", 1)], 3],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_invalid_setting_is_refused_naming_field_value_and_what_is_allowed(
    name: str, subtests: pytest.Subtests
) -> None:
    for value in IMPOSSIBLE[name]:
        with subtests.test(repr(value)):
            with pytest.raises(UsageError) as refusal:
                DecoderConfig(**{name: value})
            message = str(refusal.value)
            assert message.startswith(f"{name}={value!r}; allowed: ") and "\n" not in message


IMPOSSIBLE_FOR_A_DECODER: dict[str, list[Any]] = {
    "drafter": ["", "ngrams", "ngram:x", "ngram:0", "ngram:3-2", "none:1", "model:1", "model", 5, None],
    "num_draft_tokens": [-1, MAX_DRAFT_TOKENS + 1, "four", True, 2.0],
    "acceptance": ["", "greedy", "topk", "topk:0", "rejection:1", 5, None, ["match"]],
    "dtype": ["fp33", None],
    "fast": ["yes"],
    "reproducible": ["no"],
    "max_batch_size": [0],
}


@pytest.mark.parametrize("name", IMPOSSIBLE_FOR_A_DECODER)
def test_the_decoder_refuses_an_invalid_setting_in_one_line(name: str, subtests: pytest.Subtests) -> None:
    for value in IMPOSSIBLE_FOR_A_DECODER[name]:
        with subtests.test(repr(value)):
            with pytest.raises(UsageError) as refusal:
                SpeculativeDecoder("toy", **{name: value})
            message = str(refusal.value)
            assert "\n" not in message
            assert message.startswith((f"{name}=", "ngram sizes")), message
            assert "allowed: " in message or "needs a draft model" in message


def test_decoder_takes_every_setting_and_its_default_from_the_config() -> None:
    parameters = inspect.signature(SpeculativeDecoder.__init__).parameters
    defaults = asdict(DecoderConfig())
    for name, default in defaults.items():
        assert parameters[name].default == default or (name == "load_options" and parameters[name].default is None)
    assert asdict(SpeculativeDecoder("toy").config) == defaults


def test_every_setting_has_a_help_text() -> None:
    for field in fields(DecoderConfig):
        assert field.metadata["help"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"drafter": "ngram:5", "num_draft_tokens": 3, "fast": False, "reproducible": True, "max_batch_size": 2},
        {"acceptance": "topk:4", "dtype": "bfloat16", "device": "cpu", "load_options": {"revision": "main"}},
    ],
)
def test_settings_survive_a_round_trip_through_json(settings: dict[str, Any], tmp_path: Path) -> None:
    config = DecoderConfig(**settings)
    file = tmp_path / "settings.json"
    file.write_text(config.to_json())
    assert DecoderConfig.from_json(file) == config


def test_settings_missing_from_a_file_keep_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"max_batch_size": 3}))
    assert DecoderConfig.from_json(file) == DecoderConfig(max_batch_size=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"max_batch": 3}', "unknown key 'max_batch'"),
        (b"[1, 2]", "is not an object"),
        (b"3", "is not an object"),
        (b"null", "is not an object"),
        (b"{", "cannot be read"),
        (b"", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"9" * 5_000, "cannot be read"),
        (b'{"max_batch_size": 0}', "max_batch_size=0"),
        (b'{"fast": "false"}', "fast='false'"),
    ],
)
def test_bad_file_is_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(UsageError) as refusal:
        DecoderConfig.from_json(file)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json"):
        DecoderConfig.from_json(tmp_path / "nowhere.json")


@pytest.mark.parametrize("count", [0, 1, MAX_DRAFT_TOKENS])
def test_a_fixed_draft_length_applies_to_every_row(count: int) -> None:
    draft, room = Draft.empty(3, torch.device("cpu")), [MAX_DRAFT_TOKENS] * 3
    assert Fixed(count).lengths([None] * 3, None, draft, room) == [count] * 3  # type: ignore[list-item, arg-type]
