"""Impossible options are refused in one line that names the field, the value and what is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import Constraint, SamplingParams, SlipstreamError, UsageError
from tests.support.markers import subcases

INF, NAN, HUGE = float("inf"), float("nan"), 10**400
NOT_NUMBERS = ["1", None, True, False, [1.0], 1j, NAN, INF, -INF, HUGE]
NOT_COUNTS = ["1", True, False, 1.0, 1.5, [1], -1, NAN, INF]

IMPOSSIBLE: dict[str, list[Any]] = {
    "temperature": [*NOT_NUMBERS, -0.1, -1, 1e300],
    "top_k": [*NOT_COUNTS, None],
    "top_p": [*NOT_NUMBERS, 0, 0.0, -0.5, 1.0001, 2],
    "min_p": [*NOT_NUMBERS, -0.001, 1.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, 0.0, -1.2, 1e300, 1e-300],
    "presence_penalty": [*NOT_NUMBERS, 1e39, -1e39],
    "frequency_penalty": [*NOT_NUMBERS, 1e300],
    "logit_bias": [
        None,
        5,
        "5",
        [(1, 2.0)],
        {"5": 1.0},
        {-1: 1.0},
        {True: 1.0},
        {1.0: 1.0},
        {5: "1"},
        {5: None},
        {5: True},
        {5: NAN},
        {5: INF},
        {5: HUGE},
        {4: 1e39},
        {4: -1e300},
    ],
    "bad_words": ["word", None, 5, [5], [""], [[]], [[-1]], [["a"]], [[1.0]], [[True]], [None], {"a"}, [{1}]],
    "min_tokens": [*NOT_COUNTS, None],
    "max_tokens": [*NOT_COUNTS, None, 0],
    "stop": [None, 5, [5], [""], "", ["a", ""], [["a"]], [b"a"], b"a", {"a"}],
    "stop_token_ids": [None, 5, "5", ["5"], [-1], [1.0], [True], [None], {5}],
    "ignore_eos": [None, 0, 1, "yes"],
    "seed": ["1", True, False, 1.0, -1, NAN],
    "n": [*NOT_COUNTS, None, 0],
    "logprobs": NOT_COUNTS,
    "thinking_token_budget": ["auto", True, False, 2.0, -1, NAN],
    "num_draft_tokens": ["auto", True, False, 2.0, -1, NAN],
    "suffix": ["", "a\ud800b", 5, True, [1], ("a",)],
    "prediction": ["", "a\ud800b", 5, True, [], (), [-1], ["a"], [1.0], [True], {1}, b"a"],
    "constraint": [5, "json", {"regex": "a"}],
    "logits_processors": [None, 5, print, "print", [5], [None], ["print"]],
}
POSSIBLE: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 0.7, 100.0],
    "top_k": [0, 1, 50, 10**9],
    "top_p": [1, 1.0, 0.5, 1e-6],
    "min_p": [0, 0.0, 0.5, 1, 1.0],
    "repetition_penalty": [1, 0.5, 1.3],
    "presence_penalty": [0, -2, 2.0],
    "frequency_penalty": [0, -2, 2.0],
    "logit_bias": [{}, {0: 1}, {5: -1.5, 7: -INF}],
    "bad_words": [(), [], ["word"], [[1, 2]], ["a", [3]], ((1,),)],
    "min_tokens": [0, 1, 200],
    "max_tokens": [1, 10**6],
    "stop": [(), [], "end", ["end"], ("a", "b"), "\n"],
    "stop_token_ids": [(), [0], (1, 2)],
    "ignore_eos": [True, False],
    "seed": [None, 0, 2**63, 2**70],
    "n": [1],
    "logprobs": [None, 0, 5],
    "thinking_token_budget": [None, 0, 3],
    "num_draft_tokens": [None, 0, 3],
    "suffix": [None, "a", "\n"],
    "prediction": [None, "a", "\n", [0], (1, 2)],
    "constraint": [None, Constraint(regex="a+")],
    "logits_processors": [(), [print], (print, len)],
}


def shown(value: Any) -> str:
    return "10**400" if value is HUGE or value == {5: HUGE} else repr(value)


def culprits(value: Any) -> list[str]:
    """What a message may quote: the value, or one element of it."""
    if isinstance(value, dict):
        return [f"{{{token!r}: {bias!r}}}" for token, bias in value.items()]
    return [repr(value), *(map(repr, value) if isinstance(value, list | bytes) else ())]


def test_every_field_is_tested_with_impossible_and_possible_values() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert set(IMPOSSIBLE) == set(POSSIBLE) == names


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_value_is_refused_naming_field_value_and_what_is_allowed(
    name: str, subtests: pytest.Subtests
) -> None:
    for value in IMPOSSIBLE[name]:
        with subtests.test(shown(value)):
            with pytest.raises(UsageError) as refusal:
                SamplingParams(**{name: value})
            message = str(refusal.value)
            assert "\n" not in message
            assert message.startswith(name) and "allowed: " in message
            assert any(culprit in message.partition("allowed: ")[0] for culprit in culprits(value))


@pytest.mark.parametrize("name", POSSIBLE)
def test_possible_value_is_kept_as_it_is(name: str, subtests: pytest.Subtests) -> None:
    for value in POSSIBLE[name]:
        with subtests.test(shown(value)):
            kept = getattr(SamplingParams(**{name: value}), name)
            assert kept == ((value,) if name == "stop" and isinstance(value, str) else value)


def test_a_refusal_is_a_value_error_and_a_slipstream_error() -> None:
    with pytest.raises(ValueError):
        SamplingParams(top_p=2)
    with pytest.raises(SlipstreamError):
        SamplingParams(top_p=2)


@subcases("name", ["temprature", "max_new_tokens", "do_sample", "Temperature", "prompt_length"])
def test_unknown_option_is_refused_with_the_list_of_known_ones(name: str) -> None:
    with pytest.raises(UsageError) as refusal:
        SamplingParams(**{name: 1})
    message = str(refusal.value)
    assert message.startswith(f"unknown option {name!r}; allowed: ") and "\n" not in message
    assert all(field.name in message for field in fields(SamplingParams))


def test_unknown_option_is_refused_by_replace_as_well() -> None:
    with pytest.raises((UsageError, TypeError), match="nonsense"):
        replace(SamplingParams(), nonsense=1)
    with pytest.raises(UsageError, match=r"^top_p=3; allowed"):
        replace(SamplingParams(), top_p=3)


def test_min_tokens_beyond_max_tokens_is_refused_with_both_values() -> None:
    with pytest.raises(UsageError, match=r"^min_tokens=6; allowed: 0 to max_tokens \(5\)$"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5


def test_message_reads_as_a_sentence() -> None:
    with pytest.raises(UsageError) as refusal:
        SamplingParams(top_p=0)
    assert str(refusal.value) == "top_p=0; allowed: a number above 0, up to 1"


def test_defaults_are_greedy_and_every_field_says_what_it_means() -> None:
    assert SamplingParams().temperature == 0
    for field in fields(SamplingParams):
        assert field.metadata["help"]


def test_a_stop_string_means_the_same_alone_and_in_a_list() -> None:
    assert SamplingParams(stop="end").stop_strings == SamplingParams(stop=["end"]).stop_strings == ("end",)


@subcases(
    "options, field, token",
    [
        ({"logit_bias": {3: 1.0, 10: 1.0}}, "logit_bias", 10),
        ({"stop_token_ids": [11]}, "stop_token_ids", 11),
        ({"bad_words": ["text", [1, 2], [3, 12]]}, "bad_words", 12),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(options: dict[str, Any], field: str, token: int) -> None:
    params = SamplingParams(**options)
    with pytest.raises(UsageError, match=f"^{field}: token id {token}; allowed: 0 to 9$"):
        params.check_vocabulary(10)
    params.check_vocabulary(token + 1)


def test_params_are_checked_without_pytorch() -> None:
    code = "import sys, slipstream; slipstream.SamplingParams(top_k=5); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_and_arrays_of_numpy_and_pytorch_are_taken_as_python_values() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=np.int64(4),
        seed=np.uint8(3),
        top_k=torch.tensor(3),
        top_p=torch.tensor(0.5),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(3): np.float32(1)},
        bad_words=[torch.tensor([3, 5]), "x"],
        prediction=[np.int32(7)],
    )
    changed = {name: value for name, value in params.to_dict().items() if value != SamplingParams().to_dict()[name]}
    assert json.loads(json.dumps(changed)) == {
        "temperature": 0.5,
        "max_tokens": 4,
        "seed": 3,
        "top_k": 3,
        "top_p": 0.5,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "logit_bias": {"3": 1.0},
        "bad_words": [[3, 5], "x"],
        "prediction": [7],
    }
    for options, message in (
        ({"temperature": np.float32("nan")}, "temperature=nan; allowed: a number, 0 or more"),
        ({"max_tokens": np.float64(4.5)}, "max_tokens=4.5; allowed: a whole number"),
        ({"max_tokens": np.array([4])}, r"max_tokens=\[4\]; allowed: a whole number"),
    ):
        with pytest.raises(UsageError, match=message):
            SamplingParams(**options)
