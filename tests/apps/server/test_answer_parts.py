"""The parts of answers: usage, statistics, names and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.apps.server.answer_state import ChoiceState, ModelFacts, public_name, usage
from slipstream.apps.server.live_request import Committed, Job, LiveRequest
from slipstream.core.rounds import Round
from slipstream.core.types import Row
from slipstream.models.toy import ToyTokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.text.results import Stats
from tests.support.vocabularies import vocabulary

ROUND = Round(0, 0, 1, 3, (7, 8, 9), (7, 8, 5), 2, True, num_prediction_tokens=3)


class Unread(list[Round]):
    """Rounds that may be appended but not read."""

    def __iter__(self) -> Iterator[Round]:
        raise AssertionError("rounds were read")


def test_the_usage_of_a_chunk_reads_no_round_again() -> None:
    choice = ChoiceState(Job(LiveRequest(), 0, Row(0, [1, 2, 3], SamplingParams(), 0, prediction=(7, 8, 9))), True)
    choice.rounds = Unread()
    for step in range(2):
        choice.take(Committed(0, replace(ROUND, step=step, start=3 + 3 * step), 0.0))
    counts = usage([choice], 1)
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]) == (3, 6, 9)
    assert counts["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}


def test_running_statistics_equal_those_of_all_rounds() -> None:
    choice = ChoiceState(Job(LiveRequest(), 0, Row(0, [1, 2, 3], SamplingParams(), 0)), False)
    rounds = [replace(ROUND, step=step, num_accepted_tokens=step) for step in range(3)]
    for round in rounds:
        choice.take(Committed(0, round, 0.0))
    assert choice.stats == Stats.of(rounds, lossless=False)


def test_statistics_say_whether_the_rule_is_lossless() -> None:
    job = Job(LiveRequest(), 0, Row(0, [1, 2, 3], SamplingParams(), 0))
    for lossless in (True, False):
        assert ChoiceState(job, lossless).stats.to_dict()["lossless"] is lossless


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/srv/models/qwen", "qwen"),
        ("~/models/qwen.gguf", "qwen.gguf"),
        ("../qwen quantized to int4, group 32", "qwen quantized to int4, group 32"),
        ("hybrid", "hybrid"),
        ("suffix:2+p=40+store=/srv/ann/answers.npz", "suffix:2+p=40+store=answers.npz"),
        ("suffix:store=ann/answers.npz", "suffix:store=answers.npz"),
    ],
)
def test_clients_see_no_folders_of_the_server(name: str, shown: str) -> None:
    assert public_name(name) == shown


def facts_of(tokenizer: Any) -> ModelFacts:
    return ModelFacts("m", "f", True, lambda done: "none", True, tokenizer)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_each_token_is_reported_with_the_bytes_it_adds(kind: str) -> None:
    tokenizer = vocabulary(kind).tokenizer
    facts, text = facts_of(tokenizer), "h\u00e9 heron \U0001f426"
    ids = tokenizer.bare(text)
    assert b"".join(facts.added_bytes(token) for token in ids).decode().strip() == text
    assert any(b" " in facts.added_bytes(token) for token in ids)  # spaces are not lost
    assert any("\ufffd" in facts.token_text(token) for token in ids)  # a character of several tokens is covered


def test_tokens_without_text_are_named_by_id() -> None:
    assert facts_of(ToyTokenizer()).token_bytes(256) is None
    assert facts_of(ToyTokenizer()).token_text(256) == "token_id:256"
    assert facts_of(None).token_text(7) == "token_id:7" and facts_of(None).added_bytes(7) == b""
