"""The parts of answers: what each costs while an answer grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slipstream.apps.server.answer_parts import usage
from slipstream.apps.server.choice_state import ChoiceState
from slipstream.apps.server.live_request import Committed, Job, LiveRequest
from slipstream.core.rounds import Round
from slipstream.core.types import Row
from slipstream.sampling.params import SamplingParams
from slipstream.text.stats import Stats

ROUND = Round(0, 0, 1, 3, (7, 8, 9), (7, 8, 5), 2, True, num_prediction_tokens=3)


class Unread(list[Round]):
    """Rounds that may be added and not be read."""

    def __iter__(self) -> Iterator[Round]:
        raise AssertionError("rounds were read")


def test_the_usage_of_a_chunk_reads_no_round_again() -> None:
    choice = ChoiceState(
        Job(LiveRequest("/"), 0, Row(0, [1, 2, 3], SamplingParams(), 0, prediction=(7, 8, 9))), None, True
    )
    choice.rounds = Unread()
    for step in range(2):
        choice.take(Committed(0, replace(ROUND, step=step, start=3 + 3 * step), 0.0))
    told = usage([choice], 1)
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (3, 6, 9)
    assert told["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}


def test_running_statistics_are_those_of_all_rounds() -> None:
    choice = ChoiceState(Job(LiveRequest("/"), 0, Row(0, [1, 2, 3], SamplingParams(), 0)), None, False)
    rounds = [replace(ROUND, step=step, num_accepted_tokens=step) for step in range(3)]
    for done in rounds:
        choice.take(Committed(0, done, 0.0))
    assert choice.stats == Stats.of(rounds, lossless=False)
