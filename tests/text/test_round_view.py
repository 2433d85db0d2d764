"""The view of rounds: every committed token once, in order; rejected ones marked."""

from __future__ import annotations

import pytest

from slipstream import Result, SamplingParams, SpeculativeDecoder
from slipstream.text.round_view import legend, round_line, round_lines, to_html, views
from tests.support.tiny_models import fresh


@pytest.fixture(scope="module")
def result() -> Result:
    decoder = SpeculativeDecoder("toy", "toy:2", num_draft_tokens=4)
    return decoder.generate("The heron", SamplingParams(max_tokens=60))


def test_pieces_without_the_rejected_ones_are_the_text(result: Result) -> None:
    pieces = [piece for view in views(result.rounds, result.tokenizer) for piece in view.pieces]
    assert "".join(piece.text for piece in pieces if piece.kind != "rejected") == result.text
    assert sum(piece.kind == "rejected" for piece in pieces) > 0


def test_running_counts_end_at_the_statistics(result: Result) -> None:
    shown = list(views(result.rounds, result.tokenizer))
    assert shown[-1].total_drafted == result.stats.num_draft_tokens
    assert shown[-1].total_accepted == result.stats.num_accepted_tokens
    assert shown[-1].acceptance == f"{result.stats.acceptance_rate:.0%}"
    for view in shown:
        kinds = [piece.kind for piece in view.pieces]
        assert kinds.count("accepted") == view.num_accepted_tokens
        if "rejected" in kinds:
            assert len(view.pieces) == view.num_draft_tokens + 1 and kinds[-1] == "recovered"


def test_lines_are_readable_without_color(result: Result) -> None:
    plain = result.debug().plain.splitlines()
    assert plain[0] == legend().plain and "-rejected-" in plain[0]
    assert len(plain) == 1 + result.stats.num_rounds
    rejected = next(v for v in views(result.rounds, result.tokenizer) if any(p.kind == "rejected" for p in v.pieces))
    assert "-" in round_line(rejected).plain.partition("|")[2] and "+" in round_line(rejected).plain


def test_notebooks_show_the_escaped_text() -> None:
    decoder = SpeculativeDecoder("toy", drafter="ngram")
    html = decoder.generate("<b> & the heron <b> & the", SamplingParams(max_tokens=12))._repr_html_()
    assert "<b>" not in html and "<details>" in html and "acceptance" in html


def test_without_a_tokenizer_ids_are_shown() -> None:
    result = SpeculativeDecoder(fresh("llama"), drafter="ngram").generate([1, 2, 1, 2, 1], SamplingParams(max_tokens=5))
    assert f"[{result.token_ids[0]}]" in round_lines(result.rounds, None).plain
    assert f"[{result.token_ids[-1]}]" in to_html(result.rounds, None)


def test_a_result_without_rounds_can_be_shown() -> None:
    assert "no rounds" in to_html([], None)
    assert round_lines([], None).plain.strip() == legend().plain.strip()
