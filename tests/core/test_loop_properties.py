"""Whatever is asked for, in whatever company: a row says what it says alone, and its rounds add up.

Random prompts, options, draft lengths, orders of arrival, batch sizes, drafters and rules, on the toy model and on a
tiny transformer in double precision. Sessions compare their memory with the committed tokens all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """Requests and how they are decoded. order: in which the rows come back for a second turn."""

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
def requests(draw: st.DrawFn, vocab: int) -> SamplingParams:
    """Options of one row; each is often left alone, so that rows with and without it meet."""

    def some(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    max_tokens = some(1, 3, 7, 12, 12, 16)
    return SamplingParams(
        temperature=some(0.0, 0.0, 0.5, 1.0, 1.6),
        top_k=some(0, 0, 1, 5, 40),
        top_p=some(1.0, 1.0, 0.9, 0.4),
        min_p=some(0.0, 0.0, 0.05),
        repetition_penalty=some(1.0, 1.0, 1.4, 0.8),
        presence_penalty=some(0.0, 0.0, 2.5),
        frequency_penalty=some(0.0, 0.0, 1.5),
        logit_bias=some({}, {}, {SPACE: 2.0, 5: -3.0}),
        bad_words=some((), (), [[SPACE]], [[SPACE, 33], [7, 8, 9]]),
        stop_token_ids=some((), (), [SPACE], [LETTER_E % vocab, 12]),
        min_tokens=min(some(0, 0, 3, 9), max_tokens),
        max_tokens=max_tokens,
        seed=draw(st.integers(0, 3)),
        num_draft_tokens=some(None, None, None, None, 0, 1, 8),
    )


@st.composite
def cases(draw: st.DrawFn, model: str) -> Case:
    """Prompts are pieces of the fable, on which drafts do well, or anything."""
    vocab = 257 if model == "toy" else VOCAB
    begin, length = st.integers(0, len(TEXT) - 40), st.integers(1, 24)
    segments = st.builds(lambda at, n: [token % vocab for token in TEXT[at : at + n]], begin, length)
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
        params=draw(st.lists(requests(vocab), min_size=rows, max_size=rows)),
        order=draw(st.permutations(range(rows))),
    )


def decoder(case: Case, drafter: str) -> SpeculativeDecoder:
    """A new decoder with nothing in its memory."""
    target, draft = ("toy", "toy:2") if case.model == "toy" else (double(), perturbed("llama"))
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
def double() -> Any:
    return shared("llama", 0, torch.float64)


def check(case: Case) -> None:
    """Every row says what it says alone; then some go on from there, in another order."""
    made, by_itself = decoder(case, case.drafter), cache(partial(decoder, case))
    first = made.generate(case.prompts, case.params)
    longer = [[*result.prompt_token_ids, *result.token_ids, SPACE] for result in first]
    again = [case.params[i] for i in case.order]
    second = made.generate([longer[i] for i in case.order], again)
    for prompts, params, results in (
        (case.prompts, case.params, first),
        ([longer[i] for i in case.order], again, second),
    ):
        assert [result.prompt_token_ids for result in results] == prompts
        for index, (prompt, one, result) in enumerate(zip(prompts, params, results, strict=True)):
            # a drafted token judged by a random draw of its own changes seeded text, though not its distribution
            free = one.temperature > 0 and case.rule in ("block", "rejection")
            other = by_itself(case.drafter if free else "none")
            other.forget()
            other.forget_learned()
            alone = other.generate(prompt, one)
            assert (result.token_ids, result.finish_reason) == (alone.token_ids, alone.finish_reason)
            _adds_up(index, one, result)
        _shares_steps(case, results)


def _adds_up(index: int, params: SamplingParams, result: Result) -> None:
    """The rounds of a row tell its output, one after another, and end as it does."""
    whole, at = [*result.prompt_token_ids, *result.token_ids], len(result.prompt_token_ids)
    for done in result.rounds:
        kept = done.num_accepted_tokens
        assert (done.row, done.start) == (index, at)
        assert done.tokens == tuple(whole[at : at + len(done.tokens)]) != ()
        assert done.tokens[:kept] == done.draft[:kept]
        assert kept <= len(done.draft) and len(done.tokens) <= kept + 1
        assert done.origins.count("accepted") == kept and len(done.origins) == len(done.tokens)
        assert not done.rejected or kept < len(done.draft)
        assert len(done.draft) <= params.max_tokens - (at - len(result.prompt_token_ids)) - 1
        if params.num_draft_tokens is not None:
            assert len(done.draft) <= params.num_draft_tokens
        at += len(done.tokens)
    assert at == len(whole)
    assert [done.finish_reason for done in result.rounds] == [None] * (len(result.rounds) - 1) + [result.finish_reason]
    assert all(before.step < after.step for before, after in pairwise(result.rounds))
    assert params.min_tokens <= len(result.token_ids) <= params.max_tokens
    ended = result.token_ids[-1] in (*params.stop_token_ids, 256)
    assert (result.finish_reason == "stop") == ended or len(result.token_ids) == params.max_tokens
    assert result.stats == Stats.of(result.rounds)


def _shares_steps(case: Case, results: list[Result]) -> None:
    """No step has more rows than there are places, and each row of a step knows how many they were."""
    rounds = [done for result in results for done in result.rounds]
    sizes = [done.num_rows for done in rounds]
    assert max(sizes) <= case.max_batch_size
    steps = [done.step for done in rounds]
    assert all(steps.count(done.step) == done.num_rows for done in rounds)


@settings(STEADY, max_examples=40)
@given(cases("toy"))
def test_a_row_of_the_toy_says_what_it_says_alone(case: Case) -> None:
    check(case)


@settings(STEADY, max_examples=12)
@given(cases("llama"))
def test_a_row_of_a_transformer_says_what_it_says_alone(case: Case) -> None:
    check(case)


# what must be found


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


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a row that moves leaves its memory behind": (ToyBackend, "copy", lambda *given: None),
    "an end is overlooked inside a block": (Row, "commit", ends_with_its_last_token),
    "penalties do not see the draft": (
        history.Penalties,
        "_occurrences",
        staticmethod(lambda ids, drafted: ids.new_zeros(len(ids), drafted.shape[1] + 1, ids.shape[1])),
    ),
    "random draws go by the place in the batch": (Sampler, "_token_key", keyed_by(lambda i, row, at: (i, at))),
    "random draws go by the draft": (
        Sampler,
        "_token_key",
        keyed_by(lambda i, row, at: (row.seed, at, len(row.tokens))),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    hunt = settings(STEADY, max_examples=150, phases=[Phase.generate])(given(cases("toy"))(check))
    with patch.object(*FAULTS[fault]), pytest.raises((AssertionError, SlipstreamError)):
        hunt()
