"""Whatever the options and the batch mates, a row has the text it has alone, and its rounds add up to it.

Random prompts, options, draft lengths, orders of arrival, batch sizes, drafters and rules, on the toy model and on a
tiny transformer in double precision. Sessions compare their caches with the committed tokens all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slipstream import Result, SamplingParams, SlipstreamError, SpeculativeDecoder, Stats
from slipstream.core.rng import key
from slipstream.core.types import Row
from slipstream.models.toy import FABLE, ToyBackend
from slipstream.reproducibility.calibration import Calibration
from slipstream.sampling import processors as history
from slipstream.sampling.sampler import Sampler
from tests.support.tiny_models import VOCAB, perturbed, shared

pytestmark = pytest.mark.slow

TEXT = list(FABLE.replace("\n", " ").encode())
SPACE, LETTER_E = 32, 101
# narrow widths and short chunks, so that short prompts already take several forwards
SHAPES = Calibration(widths=(4, 8, 16), attended_unit=16, milliseconds={4: 1.0, 8: 1.0})
STEADY = settings(report_multiple_bugs=False, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def every_cache_audit() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLIPSTREAM_DEBUG", "1")
        yield


@dataclass(frozen=True)
class Case:
    """Requests and how they are decoded; `order` is that of the rows in their second turn."""

    model: str
    drafter: str
    rule: str
    num_draft_tokens: int
    max_batch_size: int
    reproducible: bool
    prompts: list[list[int]]
    params: list[SamplingParams]
    order: list[int]


@st.composite
def requests(draw: st.DrawFn, vocab: int, fixed: dict[str, Any]) -> SamplingParams:
    """Options of one row; each that is not fixed is often left at its default, so that batches are mixed."""

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    max_tokens = pick(1, 3, 7, 12, 12, 16)
    params = SamplingParams(
        temperature=pick(0.0, 0.0, 0.5, 1.0, 1.6),
        top_k=pick(0, 0, 1, 5, 40),
        top_p=pick(1.0, 1.0, 0.9, 0.4),
        min_p=pick(0.0, 0.0, 0.05),
        repetition_penalty=pick(1.0, 1.0, 1.4, 0.8),
        presence_penalty=pick(0.0, 0.0, 2.5),
        frequency_penalty=pick(0.0, 0.0, 1.5),
        logit_bias=pick({}, {}, {SPACE: 2.0, 5: -3.0}),
        bad_words=pick((), (), [[SPACE]], [[SPACE, 33], [7, 8, 9]]),
        stop_token_ids=pick((), (), [SPACE], [LETTER_E % vocab, 12]),
        min_tokens=min(pick(0, 0, 3, 9), max_tokens),
        max_tokens=max_tokens,
        seed=draw(st.integers(0, 3)),
        num_draft_tokens=pick(None, None, None, None, 0, 1, 8),
    )
    return replace(params, **fixed)


@st.composite
def cases(draw: st.DrawFn, model: str, **fixed: Any) -> Case:
    """Requests that have the fixed options. Prompts are pieces of the fable, on which drafts do well, or anything."""
    vocab = 257 if model == "toy" else VOCAB
    begin, length = st.integers(0, len(TEXT) - 40), st.integers(1, 24)
    segments = st.builds(lambda start, n: [token % vocab for token in TEXT[start : start + n]], begin, length)
    anything = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=24)
    prompts = draw(st.lists(segments | segments | anything, min_size=2, max_size=5))
    rows = len(prompts)
    return Case(
        model,
        drafter=draw(
            st.sampled_from(
                [
                    "none",
                    "ngram",
                    "ngram:1",
                    "ngram_table",
                    "ngram_table:2-3+fill",
                    "suffix:outputs=0",
                    "model",
                    "model",
                ]
            )
        ),
        rule=draw(st.sampled_from(["auto", "match", "match", "block", "rejection"])),
        num_draft_tokens=draw(st.sampled_from([1, 2, 4, 6])),
        max_batch_size=draw(st.integers(1, 4)),
        reproducible=draw(st.booleans()),
        prompts=prompts,
        params=draw(st.lists(requests(vocab, fixed), min_size=rows, max_size=rows)),
        order=draw(st.permutations(range(rows))),
    )


def decoder(case: Case, drafter: str) -> SpeculativeDecoder:
    """A decoder with empty caches."""
    target, draft = ("toy", "toy:2") if case.model == "toy" else (double_precision_model(), perturbed("llama"))
    with patch("slipstream.reproducibility.calibration_cache.remembered", lambda loaded, rows: SHAPES):
        return SpeculativeDecoder(
            target,
            draft if drafter == "model" else None,
            drafter=drafter,
            acceptance=case.rule,
            num_draft_tokens=case.num_draft_tokens,
            max_batch_size=case.max_batch_size,
            reproducible=case.reproducible,
        )


@cache
def double_precision_model() -> Any:
    return shared("llama", 0, torch.float64)


def check(case: Case) -> None:
    """Every row has the text it has alone, also in a second turn that continues the texts in another order."""
    decoder_of_all, fresh_decoder = decoder(case, case.drafter), cache(partial(decoder, case))
    first = decoder_of_all.generate(case.prompts, case.params)
    longer = [[*result.prompt_token_ids, *result.token_ids, SPACE] for result in first]
    params_again = [case.params[i] for i in case.order]
    second = decoder_of_all.generate([longer[i] for i in case.order], params_again)
    for prompts, params, results in (
        (case.prompts, case.params, first),
        ([longer[i] for i in case.order], params_again, second),
    ):
        assert [result.prompt_token_ids for result in results] == prompts
        for index, (prompt, options, result) in enumerate(zip(prompts, params, results, strict=True)):
            # a drafted token judged by a random draw of its own changes seeded text, though not its distribution
            is_seeded_by_draft = options.temperature > 0 and case.rule in ("block", "rejection")
            decoder_of_one = fresh_decoder(case.drafter if is_seeded_by_draft else "none")
            decoder_of_one.forget()
            decoder_of_one.forget_learned()
            alone = decoder_of_one.generate(prompt, options)
            assert (result.token_ids, result.finish_reason) == (alone.token_ids, alone.finish_reason)
            check_rounds_add_up(index, options, result)
        check_steps(case, results)


def check_rounds_add_up(index: int, params: SamplingParams, result: Result) -> None:
    """The rounds of a row make up its output, in order, and the last one has its finish reason."""
    text, position = [*result.prompt_token_ids, *result.token_ids], len(result.prompt_token_ids)
    for round in result.rounds:
        kept = round.num_accepted_tokens
        assert (round.row, round.start) == (index, position)
        assert round.tokens == tuple(text[position : position + len(round.tokens)]) != ()
        assert round.tokens[:kept] == round.draft[:kept]
        assert kept <= len(round.draft) and len(round.tokens) <= kept + 1
        assert round.origins.count("accepted") == kept and len(round.origins) == len(round.tokens)
        assert not round.rejected or kept < len(round.draft)
        assert len(round.draft) <= params.max_tokens - (position - len(result.prompt_token_ids)) - 1
        if params.num_draft_tokens is not None:
            assert len(round.draft) <= params.num_draft_tokens
        position += len(round.tokens)
    assert position == len(text)
    assert [round.finish_reason for round in result.rounds] == [None] * (len(result.rounds) - 1) + [
        result.finish_reason
    ]
    assert all(before.step < after.step for before, after in pairwise(result.rounds))
    assert params.min_tokens <= len(result.token_ids) <= params.max_tokens
    ended = result.token_ids[-1] in (*params.stop_token_ids, 256)
    assert (result.finish_reason == "stop") == ended or len(result.token_ids) == params.max_tokens
    assert result.stats == Stats.of(result.rounds)


def check_steps(case: Case, results: list[Result]) -> None:
    """No step has more rows than the batch allows, and each round reports the number of rows in its step."""
    rounds = [round for result in results for round in result.rounds]
    sizes = [round.num_rows for round in rounds]
    assert max(sizes) <= case.max_batch_size
    steps = [round.step for round in rounds]
    assert all(steps.count(round.step) == round.num_rows for round in rounds)


@settings(STEADY, max_examples=25)
@given(cases("toy"))
def test_a_row_of_the_toy_model_has_the_text_it_has_alone(case: Case) -> None:
    check(case)


@settings(STEADY, max_examples=8)
@given(cases("llama"))
def test_a_row_of_a_transformer_has_the_text_it_has_alone(case: Case) -> None:
    check(case)


# negative controls


def ends_with_its_last_token(row: Row, tokens: Sequence[int]) -> tuple[int, ...]:
    row.tokens.extend(tokens)
    if tokens[-1] in row.end_ids and row.num_output_tokens >= row.params.min_tokens:
        row.finish_reason = "stop"
    elif row.remaining <= 0:
        row.finish_reason = "length"
    return tuple(tokens)


def keyed_by(parts: Callable[[int, Row, int], tuple[int, ...]]) -> Callable[[Sampler, int, int], int]:
    """`Sampler._token_key` with other parts, made of the row's place, the row and the position."""

    def token_key(self: Sampler, row: int, offset: int) -> int:
        return key(*parts(row, self.rows[row], len(self.rows[row].tokens) + offset))

    return token_key


# what is replaced by what, and the options that all rows then have, so that few cases miss the fault
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], dict[str, Any]]] = {
    "a row that moves leaves its cached tokens behind": (ToyBackend, "copy", lambda *_: None, {}),
    "an end token inside a block is overlooked": (
        Row,
        "commit",
        ends_with_its_last_token,
        {"stop_token_ids": (SPACE,), "num_draft_tokens": 8, "max_tokens": 16, "temperature": 0.0},
    ),
    "penalties do not see the draft": (
        history.Penalties,
        "_occurrences",
        staticmethod(lambda ids, drafted: ids.new_zeros(len(ids), drafted.shape[1] + 1, ids.shape[1])),
        {"frequency_penalty": 1.5, "num_draft_tokens": 8, "max_tokens": 16, "temperature": 0.0},
    ),
    "random draws depend on the place in the batch": (
        Sampler,
        "_token_key",
        keyed_by(lambda i, row, position: (i, position)),
        {},
    ),
    "random draws depend on the draft": (
        Sampler,
        "_token_key",
        keyed_by(lambda i, row, position: (row.seed, position, len(row.tokens))),
        {},
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_found(fault: str) -> None:
    *patched, fixed = FAULTS[fault]
    search = settings(STEADY, max_examples=150, phases=[Phase.generate])
    search_for_a_failure = search(given(cases("toy", **fixed))(check))
    with patch.object(*patched), pytest.raises((AssertionError, SlipstreamError)):
        search_for_a_failure()
