"""What sampling refuses, and what extreme options must not break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation import NoRepeatNGramLogitsProcessor

from slipstream import Draft, SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters.model import ModelDrafter
from slipstream.sampling.processors import check_stateless
from slipstream.sampling.sampler import Sampler
from tests.support.markers import subcases

VOCAB, TOY_VOCAB = 11, 257
CPU = torch.device("cpu")
NEVER = float("-inf")
NO_DRAFT = torch.zeros(1, 0, dtype=torch.int64)


def sampler_of(constraint: Any = None, **options: Any) -> Sampler:
    row = Row(0, [1, 2, 3], SamplingParams(**options), seed=0, end_ids=frozenset({0}), constraint=constraint)
    return Sampler([row], Race(VOCAB, CPU), VOCAB, CPU)


def logits_of(positions: int) -> Tensor:
    return torch.randn(1, positions, VOCAB, generator=torch.Generator().manual_seed(0))


class Remembers:
    """Forbids the tokens that it allowed in its last call."""

    def __init__(self) -> None:
        self.parity = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.parity = 1 - self.parity
        scores[:, self.parity :: 2] = NEVER
        return scores


class DrawsRandomly(Remembers):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class CountsCalls:
    def __init__(self) -> None:
        self.contexts: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.contexts.append(input_ids[0].tolist())
        return scores * 2


@pytest.mark.parametrize("processor", [Remembers(), DrawsRandomly()], ids=lambda p: type(p).__name__)
def test_processor_with_a_state_of_its_own_is_refused_by_name(processor: Any) -> None:
    sampler = sampler_of(temperature=1.0, logits_processors=[processor])
    sampler.scores(logits_of(1), NO_DRAFT)
    position, error = sampler.failures[0]
    message = str(error)
    assert position == 0 and isinstance(error, UsageError)
    assert message.startswith(f"logits_processors: {type(processor).__name__} keeps state") and "\n" not in message


def test_a_processor_refused_while_drafting_is_refused_again_while_verifying() -> None:
    sampler = sampler_of(temperature=1.0, logits_processors=[Remembers()])
    for _ in range(2):
        sampler.scores(logits_of(1), NO_DRAFT)
        assert "keeps state" in str(sampler.failures[0][1])
        sampler.drafted()
        assert not sampler.failures


def test_processor_without_state_is_called_like_generate_calls_it() -> None:
    processor = CountsCalls()
    sampler = sampler_of(temperature=1.0, logits_processors=[processor])
    logits = logits_of(3)
    assert torch.equal(sampler.scores(logits, torch.tensor([[7, 8]])), logits * 2)
    checks = len(processor.contexts)
    assert processor.contexts[-2:] == [[1, 2, 3, 7], [1, 2, 3, 7, 8]]
    sampler.scores(logits, torch.tensor([[7, 8]]))
    assert processor.contexts[checks:] == [[1, 2, 3], [1, 2, 3, 7], [1, 2, 3, 7, 8]]  # the check for state is made once


def test_a_processor_is_called_with_texts_of_the_row_only() -> None:
    def after_the_prompt(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[1] >= 3, "shorter than the prompt"
        return scores * 2

    sampler = sampler_of(temperature=1.0, logits_processors=[after_the_prompt])
    assert torch.equal(sampler.scores(logits_of(1), NO_DRAFT), logits_of(1) * 2)
    assert not sampler.failures


class OneToken:
    """A constraint that allows any first token and then reports a problem."""

    def masks(self, output: Sequence[int], draft: Sequence[int]) -> NDArray[np.uint8]:
        return np.array([[255 * (len(output) + j == 0)] * 2 for j in range(len(draft) + 1)], dtype=np.uint8)

    def problem(self, output: Sequence[int]) -> str | None:
        return "too large" if output else None


def test_of_two_failures_the_one_at_the_first_position_is_reported() -> None:
    def not_long(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[1] < 6, "too long"
        return scores

    sampler = sampler_of(temperature=1.0, logits_processors=[not_long], constraint=OneToken())
    sampler.scores(logits_of(4), torch.tensor([[7, 8, 9]]))
    position, error = sampler.failures[0]
    # the one that plain decoding meets, not the processor's at position 3
    assert (position, str(error)) == (1, "too large")


def test_check_stateless_returns_the_processed_scores_and_leaves_the_input_unchanged() -> None:
    def forbid_two_in_place(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 2] = NEVER
        return scores

    scores = logits_of(1)[0]
    before = scores.clone()
    answer = check_stateless(forbid_two_in_place, torch.tensor([[1]]), scores)
    assert torch.equal(scores, before)
    assert answer[0, 2] == NEVER and torch.equal(answer[:, 3:], before[:, 3:])


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": dict.fromkeys(range(TOY_VOCAB), NEVER)},
        {"bad_words": [[token] for token in range(TOY_VOCAB)]},
        {"bad_words": [[ord("n"), token] for token in range(TOY_VOCAB)]},
        {"logits_processors": [lambda ids, scores: scores.fill_(NEVER)]},
        {"logits_processors": [lambda ids, scores: scores.fill_(NEVER) if ids.shape[1] == 12 else scores]},
        {"bad_words": [[token] for token in range(TOY_VOCAB - 1)], "min_tokens": 1},
    ],
    ids=["bias", "bad words", "bad words of two tokens", "processor", "later", "only the end is left, too early"],
)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_leave_no_token_are_an_error(temperature: float, drafter: str, options: dict[str, Any]) -> None:
    decoder = SpeculativeDecoder("toy", drafter=drafter)
    with pytest.raises(SlipstreamError, match="leave no token"):
        decoder.generate("heron heron", SamplingParams(temperature=temperature, seed=0, **options))


def test_one_allowed_token_is_enough() -> None:
    sampler = sampler_of(temperature=1.0, logit_bias=dict.fromkeys(range(1, VOCAB), NEVER))
    assert sampler.choose(logits_of(3), Draft.from_lists([[0, 0]], CPU)).tolist() == [[0, 0, 0]]


@subcases("temperature", [1e-3, 1e-10, 1e-38, 1e-45, 1e-60, 1e-300])
def test_a_tiny_temperature_gives_the_greedy_distribution(temperature: float) -> None:
    logits, sampler = 20 * logits_of(1), sampler_of(temperature=temperature)
    expected = torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float()
    assert torch.equal(sampler.probs(sampler.scores(logits, NO_DRAFT)), expected)


@pytest.mark.parametrize("temperature", [1e10, 1e30])
def test_distribution_of_a_huge_temperature_is_uniform_over_what_is_allowed(temperature: float) -> None:
    expected = torch.full((VOCAB,), 1 / (VOCAB - 1)).index_fill(0, torch.tensor([4]), 0.0)
    sampler = sampler_of(temperature=temperature, logit_bias={4: NEVER})
    assert torch.allclose(sampler.probs(sampler.scores(logits_of(1), NO_DRAFT))[0, 0], expected)


class Proposes:
    """A drafter that always proposes the same tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        return Draft.from_lists([self.tokens[:length] for length in lengths], sampler.device)


def dead_after_a_forbidden_token(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Allows no X, and nothing after an X, as grammars do."""
    if int(input_ids[0, -1]) == ord("X"):
        return torch.full_like(scores, NEVER)
    return scores.index_fill(-1, torch.tensor([ord("X")]), NEVER)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_without_an_allowed_continuation_does_not_fail_its_row(temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    processors = [dead_after_a_forbidden_token, NoRepeatNGramLogitsProcessor(5)]
    params = SamplingParams(**options, logits_processors=processors)
    plain = SpeculativeDecoder("toy", drafter="none").generate("The heron", params)
    drafted = SpeculativeDecoder("toy", drafter=Proposes(b"XX"), num_draft_tokens=2).generate("The heron", params)
    assert drafted.token_ids == plain.token_ids


def dead_after_a_zero(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Allows no zero byte, and nothing after one."""
    if int(input_ids[0, -1]) == 0:
        return torch.full_like(scores, NEVER)
    return scores.index_fill(-1, torch.tensor([0]), NEVER)


def test_padding_after_a_shorter_draft_does_not_fail_its_row() -> None:
    params = [SamplingParams(max_tokens=6, num_draft_tokens=n, logits_processors=[dead_after_a_zero]) for n in (1, 4)]
    prompts: list[Any] = ["The heron", "The sparrow"]
    plain = SpeculativeDecoder("toy", drafter="none").generate(prompts, params)
    drafted = SpeculativeDecoder("toy", drafter=Proposes(b" was")).generate(prompts, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]


class WrongAtFirst:
    """Proposes the text itself, except that its first draft has a wrong X."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.asked = list(text), 0

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.asked += 1
        at = rows[0].num_output_tokens
        right = self.text[at : at + lengths[0]]
        return Draft.from_lists([right if self.asked > 1 else [right[0], ord("X"), *right[2:]]], sampler.device)


def refuses_an_x(input_ids: Tensor, scores: Tensor) -> Tensor:
    if ord("X") in input_ids[0].tolist():
        raise ValueError("asked about an X")
    return scores


def test_a_processor_that_failed_on_a_rejected_draft_does_not_fail_a_later_round() -> None:
    options = SamplingParams(max_tokens=16, logits_processors=[refuses_an_x])
    plain = SpeculativeDecoder("toy", drafter="none").generate("The heron", options)
    drafter = WrongAtFirst(plain.token_ids)
    drafted = SpeculativeDecoder("toy", drafter=drafter, num_draft_tokens=4).generate("The heron", options)
    assert drafter.asked > 1 and drafted.token_ids == plain.token_ids


def none(input_ids: Tensor, scores: Tensor) -> Any:
    return None


class Half:
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.half()


def flat(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores[0]


def not_a_number(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores * float("nan")


def later_not_a_number(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Returns NaN only for longer texts."""
    return scores * (float("nan") if input_ids.shape[1] > 14 else 1.0)


@pytest.mark.parametrize(
    ("processor", "name", "answer"),
    [
        (none, "none", "a NoneType"),
        (Half(), "Half", r"torch.float16 of shape \(1, 257\)"),
        (flat, "flat", r"torch.float32 of shape \(257,\)"),
        (not_a_number, "not_a_number", "NaN"),
        (later_not_a_number, "later_not_a_number", "NaN"),
    ],
)
def test_a_processor_that_returns_wrong_scores_is_named_with_what_is_allowed(
    processor: Any, name: str, answer: str
) -> None:
    expected = r"allowed: scores without NaN, torch.float32 of shape \(1, 257\)"
    params = SamplingParams(max_tokens=8, logits_processors=[processor])
    with pytest.raises(SlipstreamError, match=f"logits_processors: {name} returned {answer}; {expected}") as refusal:
        SpeculativeDecoder("toy", drafter="none").generate("The heron", params)
    assert "\n" not in str(refusal.value)


def centered(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Returns NaN where a token is impossible, as tokens that a smaller draft model lacks are."""
    return scores - scores.mean(-1, keepdim=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_on_the_draft_models_logits_does_not_fail_its_row(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = ModelDrafter._fit
    lacking = torch.tensor([ord("Q")])
    monkeypatch.setattr(ModelDrafter, "_fit", lambda self, logits: fit(self, logits).index_fill(-1, lacking, NEVER))
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=2, logits_processors=[centered])
    plain = SpeculativeDecoder("toy", drafter="none").generate("The heron", params)
    drafted = SpeculativeDecoder("toy", "toy:3", drafter="model", num_draft_tokens=4).generate("The heron", params)
    assert drafted.token_ids == plain.token_ids and drafted.stats.num_draft_tokens > 0
