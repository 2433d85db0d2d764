"""Predictions never change a text: right, wrong and edited ones, alone and in batches, beside every drafter."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import Draft, Result, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters._predictions import Place, PredictionDrafter
from slipstream.sampling.sampler import Sampler
from tests.support.embedded_model import loaded
from tests.support.markers import mostly_exhaustive, mostly_slow, subcases
from tests.support.tiny_models import perturbed, prompts, shared

pytestmark = pytest.mark.usefixtures("cache_audit")

GREEDY, SAMPLED = SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.9, seed=3)
FREE = ("none", "ngram", "suffix", "token_recycling", "ngram_table", "layer_skip")
WRONG = "There is no such text, and never was.\nNothing of it comes true."


def toy(drafter: str = "none", **settings: Any) -> SpeculativeDecoder:
    """A decoder that always drafts eight tokens a round, so that measured times do not matter."""
    return SpeculativeDecoder("toy", drafter="ngram", **{"num_draft_tokens": 8} | settings).using(drafter)


def edited(text: str) -> str:
    """The text with a token replaced, some removed and some inserted."""
    return f"{text[:9]}x{text[10:20]}{text[24:30]} and more{text[30:]}"


def plain(decoder: SpeculativeDecoder, prompt: Any, params: SamplingParams) -> Result:
    return decoder.using("none").generate(prompt, replace(params, prediction=None))


def row(prediction: Sequence[int]) -> Row:
    predicted = Row(0, [500, 501], SamplingParams(max_tokens=1000), seed=0)
    predicted.prediction = prediction
    return predicted


OLD = [1, 2, 3, 4, 0, 5, 6, 7, 8, 0, 9, 10, 11, 12, 0, *range(13, 60)]
TWICE = [1, 2, 3, 40, 41, 1, 2, 3, 50, 51, 1, 2, 3, 60, 61]


@pytest.mark.parametrize(
    ("prediction", "output", "expected"),
    [
        (OLD, [], OLD),
        (OLD, OLD[:7], OLD[7:]),
        (OLD, [1, 2, 77, 78, 79, 4], OLD[4:]),  # a replaced token
        (OLD, [1, 2, 6], OLD[7:]),  # omitted ones
        (OLD, [1, 2, *range(70, 120), 3, 4], OLD[4:]),  # inserted ones
        (OLD, [1, 2, *range(70, 80), 59], []),  # one token is not enough to jump far
        (OLD, [*OLD, 70, 71, 5, 6], OLD[7:]),  # back to an earlier place
        (TWICE, [*TWICE[:8], 70, 71, 2, 3], [60, 61]),  # the next of equal matches
        (TWICE, [*TWICE[:8], 70, 71, 40, 41, 1, 2, 3], TWICE[8:]),  # the longest of several
    ],
)
def test_the_place_in_a_prediction_is_found_after_edits(
    prediction: list[int], output: list[int], expected: list[int]
) -> None:
    place = Place(row(prediction))
    place.read([500, 501, *output])
    assert place.prediction[place.index :] == expected


def draft_of(drafter: PredictionDrafter, predicted: Row) -> list[int]:
    sampler = Sampler([predicted], Race(600, torch.device("cpu")), 600, torch.device("cpu"))
    draft = drafter.propose([predicted], [MAX_DRAFT_TOKENS], sampler)
    return draft.tokens[0, : draft.lengths[0]].tolist()


def test_a_prediction_that_fails_is_drafted_less_and_less_until_it_is_right_again() -> None:
    drafter, wrong, old = PredictionDrafter(), row(list(range(250))), list(range(250))
    drafted = []
    for start in range(0, 120, 2):  # two tokens of the prediction lead astray again and again
        wrong.tokens += [300 + start]
        draft_of(drafter, wrong)
        wrong.tokens += old[start : start + 2]
        drafted.append(len(draft_of(drafter, wrong)))
    assert sum(drafted) < 40 and not any(drafted[20:])
    assert draft_of(drafter, row(old)) == draft_of(PredictionDrafter(), row(old))  # other rows do not notice
    for start in range(150, 190):
        wrong.tokens += [old[start]]
        draft = draft_of(drafter, wrong)
    assert len(draft) > 20 and draft == old[190 : 190 + len(draft)]


@pytest.mark.each_value
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(GREEDY, repetition_penalty=1.2)], ids=["0", "t", "pen"])
@pytest.mark.parametrize("drafter", FREE)
@pytest.mark.parametrize("count", mostly_slow([8, "auto"], 8))
def test_predictions_keep_the_text_of_plain_decoding_with_every_drafter(
    count: int | str, drafter: str, params: SamplingParams
) -> None:
    decoder = toy(drafter, acceptance="match", num_draft_tokens=count)
    expected = plain(decoder, "The heron", params)
    for prediction in (expected.text, edited(expected.text), WRONG, expected.token_ids):
        result = decoder.generate("The heron", replace(params, prediction=prediction))
        assert result.token_ids == expected.token_ids
        assert (result.stats.accepted_prediction_tokens or 0) > 15 or prediction == WRONG or count == "auto"


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize(
    "settings",
    mostly_exhaustive([{}, {"num_draft_tokens": 4}, {"num_draft_tokens": "heuristic"}], {}, {"num_draft_tokens": 4}),
    ids=str,
)
@pytest.mark.parametrize("drafter", ["model", "hybrid"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_predictions_keep_the_text_of_plain_decoding_with_a_draft_model(
    drafter: str, params: SamplingParams, settings: dict[str, Any]
) -> None:
    made = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter=drafter, acceptance="match", **settings)
    texts = prompts((4, 20, 9))
    expected = [plain(made, text, params).token_ids for text in texts]
    guesses = [expected[0], None, [*expected[2][:8], 5, 6, *expected[2][12:]]]
    results = made.generate(texts, [replace(params, prediction=guess) for guess in guesses])
    assert [result.token_ids for result in results] == expected
    accepted = [result.stats.accepted_prediction_tokens for result in results]
    assert accepted[1] is None and (min(accepted[0] or 0, accepted[2] or 0) > 10 or not settings)


@pytest.mark.parametrize("draft", ["toy:2", None])
def test_trees_are_drafted_beside_predictions(draft: str | None) -> None:
    if draft is None:
        decoder = SpeculativeDecoder("toy", drafter="token_recycling", num_draft_tokens="4x2")
    else:
        decoder = SpeculativeDecoder("toy", draft, drafter="model", num_draft_tokens="4x2")
    texts = ["The heron", "A sparrow", "It flew"]
    options = [GREEDY, GREEDY, replace(GREEDY, max_tokens=2 * GREEDY.max_tokens)]
    expected = [plain(toy(), text, params) for text, params in zip(texts, options, strict=True)]
    guesses = [expected[0].text, None, WRONG]
    asked = [replace(params, prediction=guess) for params, guess in zip(options, guesses, strict=True)]
    results = decoder.generate(texts, asked)
    assert [result.token_ids for result in results] == [guess.token_ids for guess in expected]
    assert any(round.parents for result in results for round in result.rounds)  # trees beside predicted chains


def test_a_wrong_prediction_replaces_no_retrieved_draft() -> None:
    """Retrieved drafts take precedence over an unproven prediction; a right prediction is still used later."""
    decoder = toy("ngram", num_draft_tokens=8)
    prompt, params = "A heron stood. A heron stood. A heron", replace(GREEDY, max_tokens=40)
    without = decoder.generate(prompt, params)
    wrong = decoder.generate(prompt, replace(params, prediction=WRONG))
    right = decoder.generate(prompt, replace(params, prediction=without.text))
    assert wrong.token_ids == right.token_ids == without.token_ids
    assert without.stats.num_accepted_tokens > 0  # retrieval does draft here
    assert wrong.stats.num_rounds <= without.stats.num_rounds and right.stats.num_rounds < without.stats.num_rounds


def test_rows_without_a_prediction_are_drafted_as_if_alone() -> None:
    decoder = toy("ngram", num_draft_tokens=5)
    alone = decoder.generate("A sparrow", GREEDY)
    text = plain(decoder, "The heron", GREEDY).text
    beside = decoder.generate(["The heron", "A sparrow"], [replace(GREEDY, prediction=text), GREEDY])[1]
    assert [round.draft for round in beside.rounds] == [round.draft for round in alone.rounds]
    assert beside.stats.accepted_prediction_tokens is beside.stats.rejected_prediction_tokens is None


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", mostly_exhaustive(["auto", "block", "rejection"], "auto", "block"))
def test_a_seed_with_a_prediction_repeats_its_text_under_every_rule(acceptance: str) -> None:
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter="model", acceptance=acceptance)
    prompt = prompts((6,))[0]
    guess = plain(decoder, prompt, SAMPLED).token_ids
    first, again = (decoder.generate(prompt, replace(SAMPLED, prediction=guess)) for _ in range(2))
    assert first.token_ids == again.token_ids
    if acceptance == "auto":  # lengths follow measured times, which no text depends on
        assert first.token_ids == guess
    else:
        assert [round.draft for round in first.rounds] == [round.draft for round in again.rounds]
    assert (first.stats.accepted_prediction_tokens or 0) > 0


def test_a_prediction_does_not_change_stop_strings_logprobs_or_several_texts() -> None:
    decoder, text = toy("suffix"), plain(toy(), "The heron", GREEDY).text
    params = replace(SAMPLED, n=2, logprobs=2, stop=[text[30:34]])
    without = decoder.generate("The heron", params)
    result = decoder.generate("The heron", replace(params, prediction=text))
    for predicted, unpredicted in zip([result, *result.alternatives], [without, *without.alternatives], strict=True):
        assert (predicted.text, predicted.token_ids, predicted.finish_reason) == (
            unpredicted.text,
            unpredicted.token_ids,
            unpredicted.finish_reason,
        )
        assert predicted.logprobs == unpredicted.logprobs
        assert predicted.stats.accepted_prediction_tokens is not None


changes = st.lists(st.tuples(st.integers(0, 59), st.integers(0, 8), st.binary(max_size=8)), max_size=5)


@pytest.mark.slow
@settings(max_examples=12)
@given(changes, st.sampled_from(["none", "suffix"]), st.booleans())
def test_no_edit_of_the_prediction_changes_the_text(
    edits: Sequence[tuple[int, int, bytes]], drafter: str, sampled: bool
) -> None:
    decoder, params = _toy(drafter), SAMPLED if sampled else GREEDY
    expected = plain(decoder, "So the heron", params).token_ids
    prediction = list(expected)
    for at, gone, new in edits:
        prediction[at : at + gone] = new
    result = decoder.generate("So the heron", replace(params, prediction=[*prediction, 5]))
    assert result.token_ids == expected


@cache
def _toy(drafter: str) -> SpeculativeDecoder:
    return toy(drafter, max_batch_size=2)


@pytest.mark.exhaustive
def test_a_rule_that_accepts_every_prediction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a rule that accepts every predicted token changes the text."""
    from slipstream.core import acceptance, session

    def credulous(choice: Any, draft: Draft) -> Any:
        verdict = right(choice, draft)
        lengths = draft.lengths_on_device[:, 0]
        return replace(verdict, accepted=lengths, next_token=choice.gather(1, lengths[:, None])[:, 0])

    right, decoder = acceptance.match, toy()
    expected = plain(decoder, "The heron", GREEDY)
    monkeypatch.setattr(acceptance, "match", credulous)
    monkeypatch.setattr(session, "match", credulous)
    assert decoder.generate("The heron", replace(GREEDY, prediction=WRONG)).token_ids != expected.token_ids


def test_counts_of_prediction_tokens_are_summed_over_rounds() -> None:
    decoder = toy("ngram")
    text = plain(decoder, "The heron", GREEDY).text
    result = decoder.generate("The heron", replace(GREEDY, prediction=edited(text)))
    stats, rounds = result.stats, result.rounds
    predicted = sum(round.num_prediction_tokens or 0 for round in rounds)
    assert predicted == (stats.accepted_prediction_tokens or 0) + (stats.rejected_prediction_tokens or 0) > 0
    assert {round.num_prediction_tokens for round in rounds} >= {0}
    saved = result.to_dict()
    assert saved["stats"]["accepted_prediction_tokens"] == stats.accepted_prediction_tokens
    assert [saved_round["num_prediction_tokens"] for saved_round in saved["rounds"]] == [
        round.num_prediction_tokens for round in rounds
    ]
    assert result.debug().plain.count(" prediction") == sum(bool(round.num_prediction_tokens) for round in rounds)


def test_drafts_grow_long_while_the_prediction_is_right() -> None:
    decoder = SpeculativeDecoder(shared("llama"), drafter="ngram", reproducible=False, num_draft_tokens=64)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    prompt = prompts((6,))[0]
    expected = plain(decoder, prompt, params).token_ids
    result = decoder.generate(prompt, replace(params, prediction=expected))
    assert result.token_ids == expected and result.stats.num_rounds < 20
    assert max(round.num_draft_tokens for round in result.rounds) > 30


def test_num_draft_tokens_also_bounds_predictions() -> None:
    text = plain(toy(), "The heron", GREEDY).text
    for decoder, params in (
        (toy("ngram", num_draft_tokens=3), GREEDY),
        (toy("ngram"), replace(GREEDY, num_draft_tokens=3)),
    ):
        result = decoder.generate("The heron", replace(params, prediction=text))
        assert max(round.num_draft_tokens for round in result.rounds) == 3
        assert result.stats.accepted_prediction_tokens == result.stats.num_accepted_tokens


def test_a_wrong_prediction_costs_few_rounds_and_few_tokens() -> None:
    params = SamplingParams(max_tokens=300)
    decoder = toy("ngram", num_draft_tokens=5)
    without = decoder.generate("The heron", params).stats
    result = decoder.generate("The heron", replace(params, prediction=WRONG * 5)).stats
    assert result.num_rounds <= 1.1 * without.num_rounds
    assert (result.rejected_prediction_tokens or 0) <= 24


@subcases(
    "made, params, message",
    [
        ({"num_draft_tokens": 0, "drafter": "ngram"}, {"prediction": "a"}, "num_draft_tokens=0, which drafts nothing"),
        ({}, {"prediction": [257]}, "prediction: token id 257; allowed: 0 to 256"),
        ({}, {"prediction": ""}, "prediction=''; allowed: None, a non-empty text"),
        ({}, {"prediction": "a", "num_draft_tokens": 0}, "prediction with num_draft_tokens=0"),
    ],
)
def test_an_invalid_constraint_is_refused_in_one_line(made: Any, params: dict[str, Any], message: str) -> None:
    decoder = SpeculativeDecoder("toy", **made)
    with pytest.raises(UsageError) as refusal:
        decoder.generate("The heron", SamplingParams(**params))
    assert message in str(refusal.value) and "allowed" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_prediction_as_text_needs_a_tokenizer() -> None:
    decoder = SpeculativeDecoder(shared("llama"))
    with pytest.raises(UsageError, match="there is no tokenizer; allowed: a list of token ids"):
        decoder.generate([1, 2, 3], SamplingParams(prediction="text"))


@pytest.mark.exhaustive
@pytest.mark.smollm2
@pytest.mark.parametrize("temperature", mostly_exhaustive([0.0, 0.8], 0.0))
def test_an_edit_by_a_real_model_equals_plain_decoding(temperature: float) -> None:
    decoder = loaded().using("suffix", num_draft_tokens=7)
    old = "def area(width, height):\n    result = width * height\n    print(result)\n    return result\n"
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1, prediction=old)
    prompt = f"Rename `result` to `size` and show the function again.\n\n```python\n{old}```"
    result = decoder.generate(prompt, params)
    assert result.token_ids == plain(decoder, prompt, params).token_ids
    if temperature == 0:
        assert (result.stats.accepted_prediction_tokens or 0) > 0
