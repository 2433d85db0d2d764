"""What results, chunks and statistics look like when they are printed, in a Python session and in a notebook."""

from __future__ import annotations

from typing import Any

import pytest
from rich.text import Text

from slipstream import Constraint, Result, SamplingParams, SpeculativeDecoder, Stats
from slipstream.text.results import statistics_line
from slipstream.text.round_view import legend

PARAMS = SamplingParams(max_tokens=60)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", drafter="ngram", num_draft_tokens=4)


@pytest.fixture(scope="module")
def result(decoder: SpeculativeDecoder) -> Result:
    return decoder.generate("The heron and the sparrow. The heron", PARAMS)


def test_a_result_prints_as_its_text(result: Result) -> None:
    assert str(result) == f"{result}" == result.text and len(result.text) > 40


def test_reprs_are_short_and_have_the_main_figures(decoder: SpeculativeDecoder, result: Result) -> None:
    shown = repr(result)
    assert shown == (
        f"Result({result.text[:37] + '...'!r}, 60 tokens, {result.stats.block_efficiency:.1f} per forward, length)"
    )
    assert f"60 tokens, {result.stats.block_efficiency:.1f} per forward, " in repr(result.stats)
    assert f"{result.stats.acceptance_rate:.0%} accepted" in repr(result.stats)
    assert repr(Stats()) == "Stats(0 tokens, 0.0 per forward, nothing drafted, 0.0 tokens per second)"
    everything = (result, result.stats, decoder, PARAMS, *decoder.stream("The heron", PARAMS))
    assert all(len(repr(value)) < 200 and "\n" not in repr(value) for value in everything)


def test_a_failed_row_says_why() -> None:
    def failing(ids: object, scores: object) -> object:
        raise ValueError("on purpose")

    params = SamplingParams(logits_processors=[failing])  # type: ignore[list-item]
    (failed,) = SpeculativeDecoder("toy", drafter="none").generate(["a"], params)
    assert failed.finish_reason == "error" and "on purpose" in repr(failed)


def test_repr_of_params_shows_only_changed_options() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0.7, stop="a")) == "SamplingParams(temperature=0.7, stop=('a',))"
    chosen = SamplingParams(max_tokens=5, constraint=Constraint(regex="a+"))
    assert eval(repr(chosen), {"SamplingParams": SamplingParams, "Constraint": Constraint}) == chosen


def test_chunks_print_as_their_texts_and_the_last_has_the_finish_reason(
    decoder: SpeculativeDecoder, result: Result
) -> None:
    chunks = list(decoder.stream("The heron and the sparrow. The heron", PARAMS))
    assert "".join(map(str, chunks)) == result.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    last = chunks[-1]
    num_accepted = last.round.num_accepted_tokens
    plural = "s" * (len(last.token_ids) != 1)
    assert repr(last) == f"Chunk({last.text!r}, {len(last.token_ids)} token{plural}, {num_accepted} accepted, length)"


def test_repr_of_rounds_has_colors_only_in_a_terminal(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = result.debug()
    assert repr(rounds) == str(rounds) == rounds.plain, "no terminal: no colors"
    assert isinstance(rounds, Text) and len(repr(rounds).splitlines()) == 1 + result.stats.num_rounds
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32maccepted" in repr(rounds) and Text.from_ansi(repr(rounds)).plain == rounds.plain
    assert str(rounds) == rounds.plain, "what goes to a file has no colors"


def test_a_notebook_shows_the_rounds_in_colors(result: Result) -> None:
    pytest.importorskip("IPython")
    shown = result.debug()._repr_mimebundle_([], [])
    assert "<span" in shown["text/html"] and "round accepted/drafted" in shown["text/plain"]


def test_the_legend_explains_only_the_origins_that_occur(result: Result) -> None:
    assert "branch" not in str(result.debug()) and "constraint" not in str(result.debug())
    assert "branch" not in result._repr_html_() and "rejected" in result._repr_html_()
    assert "branch" in legend(frozenset(["branch"])).plain and "constraint" in legend(frozenset(["forced"])).plain


def test_log_probabilities_name_their_tokens() -> None:
    result = SpeculativeDecoder("toy").generate("The heron", SamplingParams(max_tokens=8, logprobs=2))
    assert result.logprobs is not None
    assert "".join(str(entry.token) for entry in result.logprobs) == result.text
    for entry in result.logprobs:
        assert entry.top_tokens[0] == entry.token and len(entry.top_tokens) == 2
    assert result.to_dict()["logprobs"][0]["token"] == result.text[0]


def test_the_estimated_speed_up_is_what_the_planners_costs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2")
    costs = decoder._engine.policy.costs  # type: ignore[attr-defined]
    monkeypatch.setattr(costs, "learn", lambda rows, read=0: None)  # so that they stay what they are
    stats = (result := decoder.generate("The heron and the sparrow. The heron", PARAMS)).stats
    rounds = [round for round in result.rounds if round.seconds.verify]
    plain = spent = 0.0
    for round in rounds:
        parts = round.seconds
        others = parts.total - parts.prefill - parts.draft - parts.verify
        forward = parts.verify * costs.verify(1, 0) / costs.verify(1, len(round.draft))
        plain += len(round.tokens) * (others + forward)
        spent += parts.total - parts.prefill
    assert stats.num_draft_tokens and len(rounds) > 3
    assert stats.estimated_speed_up == pytest.approx(plain / spent)
    assert f", about {plain / spent:.1f}x plain decoding" in statistics_line(stats, "hybrid")
    assert stats.to_dict()["estimated_speed_up"] == stats.estimated_speed_up
    alone = decoder.generate(["The heron", "A sparrow and a stone"], PARAMS)
    together = Stats.of(round for other in alone for round in other.rounds)
    assert together.estimated_speed_up == pytest.approx(
        sum(other.stats.plain_seconds for other in alone) / 2 / together.compared_seconds, rel=0.2
    )


@pytest.mark.parametrize("settings", [{"drafter": "none"}, {"num_draft_tokens": 4}, {"reproducible": False}])
def test_without_measured_costs_nothing_is_estimated(settings: dict[str, Any]) -> None:
    stats = SpeculativeDecoder("toy", **settings).generate("The heron. The heron", PARAMS).stats
    assert stats.estimated_speed_up is None and "plain decoding" not in statistics_line(stats, "x")
