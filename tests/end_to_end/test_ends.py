"""A text ends at the same token with every drafter, even inside an accepted block."""

from functools import cache
from typing import Any

import pytest
import torch

from slipstream import Result, SamplingParams, SpeculativeDecoder
from tests.support.markers import mostly_slow
from tests.support.tiny_models import VOCAB, Oracle, fresh, perturbed, prompts, reference, shared, tokenizer

pytestmark = pytest.mark.usefixtures("cache_audit")

COUNT = 24
PROMPT = prompts([9], seed=2)[0]  # continues without special tokens
WORDS = tokenizer()
DRAFTERS = mostly_slow(["none", "ngram", "ngram_table:fill", "model", "oracle"], "none", "model", "oracle")


@cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    return reference(shared("llama"), prompt, COUNT)


def text() -> list[int]:
    return expected(tuple(PROMPT))


def first_new(after: int) -> int:
    """The first output position from `after` on whose token did not occur before it."""
    return next(i for i in range(after, COUNT) if text()[i] not in text()[:i])


def run(drafter: str, params: SamplingParams, prompt: list[int] = PROMPT, ends: Any = None, count: int = 6) -> Result:
    model = shared("llama") if ends is None else ended(ends if isinstance(ends, int) else tuple(ends))
    texts = [[*prompt, *expected(tuple(prompt))]]
    options: dict[str, Any] = {"tokenizer": WORDS, "num_draft_tokens": 0 if drafter == "none" else count}
    if drafter == "model":
        return SpeculativeDecoder(model, perturbed("llama"), **options).generate(prompt, params)
    return SpeculativeDecoder(model, drafter=Oracle(texts) if drafter == "oracle" else drafter, **options).generate(
        prompt, params
    )


@cache
def ended(ends: int | tuple[int, ...]) -> Any:
    """The shared model with end-of-sequence ids."""
    model = fresh("llama")
    model.generation_config.eos_token_id = ends if isinstance(ends, int) else list(ends)
    return model


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("position", [0, 3, 6, 7])  # in blocks of seven: first, inside, bonus, next block
def test_the_text_ends_at_end_of_sequence_wherever_it_falls_in_a_block(drafter: str, position: int) -> None:
    at = first_new(position)
    result = run(drafter, SamplingParams(max_tokens=COUNT), ends=text()[at])
    assert result.token_ids == text()[: at + 1]
    assert result.finish_reason == "stop"
    assert result.token_ids == reference(ended(text()[at]), PROMPT, COUNT)


def test_an_end_inside_the_accepted_block_drops_the_rest_of_it() -> None:
    at = first_new(2)
    result = run("oracle", SamplingParams(max_tokens=COUNT), ends=text()[at], count=10)
    _, only = result.rounds  # the first round reads the prompt
    assert only.draft[: at + 1] == tuple(text()[1 : at + 2])  # the draft was right beyond the end of the text
    assert only.num_accepted_tokens == at and only.origins == ("accepted",) * at
    assert result.token_ids == text()[: at + 1]


def test_a_round_cut_by_an_end_counts_as_rejected_only_if_its_rejection_was_reached() -> None:
    at = first_new(2)
    wrong_at = at + 2
    texts = [[*PROMPT, *text()]]
    model = ended(text()[at])
    made = SpeculativeDecoder(model, drafter=Oracle(texts, frozenset({wrong_at})), num_draft_tokens=10)
    _, only = made.generate(PROMPT, SamplingParams(max_tokens=COUNT)).rounds
    assert len(only.tokens) == only.num_accepted_tokens == at
    assert not only.rejected  # alpha counts tested tokens, and no token after the end was tested


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_earliest_of_several_end_tokens_ends_the_text(drafter: str) -> None:
    early, late = first_new(4), first_new(first_new(4) + 1)
    end_ids = [text()[late], text()[early]]
    assert run(drafter, SamplingParams(max_tokens=COUNT), ends=end_ids).token_ids == text()[: early + 1]
    stopped = SamplingParams(max_tokens=COUNT, stop_token_ids=end_ids)
    assert run(drafter, stopped).token_ids == text()[: early + 1]
    mixed = SamplingParams(max_tokens=COUNT, stop_token_ids=[text()[early]])
    assert run(drafter, mixed, ends=text()[late]).token_ids == text()[: early + 1]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ignore_eos_still_honors_stop_token_ids(drafter: str) -> None:
    early, late = first_new(4), first_new(first_new(4) + 1)
    on = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    result = run(drafter, on, ends=text()[early])
    assert (result.token_ids, result.finish_reason) == (text(), "length")
    stopped = SamplingParams(max_tokens=COUNT, ignore_eos=True, stop_token_ids=[text()[late]])
    assert run(drafter, stopped, ends=text()[early]).token_ids == text()[: late + 1]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_min_tokens_delays_the_end_as_generate_does(drafter: str) -> None:
    end = text()[first_new(3)]
    model = ended(end)
    result = run(drafter, SamplingParams(max_tokens=COUNT, min_tokens=12), ends=end)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": COUNT, "min_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT) :].tolist()
    assert result.token_ids == expected
    assert end not in result.token_ids[:12] and len(result.token_ids) > 12


@pytest.mark.pairwise
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("begin", mostly_slow([0, 2, 5, 6], 0, 5))
@pytest.mark.parametrize("length", mostly_slow([1, 3, 8], 1, 3))
def test_a_stop_string_ends_ids_at_its_last_token_and_cuts_the_text(drafter: str, begin: int, length: int) -> None:
    whole = WORDS.decode(text(), skip_special_tokens=True)
    letters = "".join(WORDS.convert_ids_to_tokens(text()))
    assert whole == letters  # one character per token, no special ones: positions in the text are positions in ids
    stop = whole[begin : begin + length]
    at = whole.index(stop)
    result = run(drafter, SamplingParams(max_tokens=COUNT, stop=[stop, "never there"]))
    assert result.token_ids == text()[: at + length]
    assert result.text == whole[:at]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_max_tokens_of_one_gives_one_token_and_no_draft(drafter: str) -> None:
    result = run(drafter, SamplingParams(max_tokens=1))
    assert (result.token_ids, result.finish_reason) == (text()[:1], "length")
    assert result.stats.num_draft_tokens == 0
    assert run(drafter, SamplingParams(max_tokens=1), ends=text()[0]).finish_reason == "stop"


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limit", mostly_slow([2, 6, 7, 8], 6, 7))
def test_max_tokens_ends_the_text_inside_a_block(drafter: str, limit: int) -> None:
    result = run(drafter, SamplingParams(max_tokens=limit))
    assert (result.token_ids, result.finish_reason) == (text()[:limit], "length")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_of_one_token_works(drafter: str) -> None:
    expected = reference(shared("llama"), [7], COUNT)
    assert run(drafter, SamplingParams(max_tokens=COUNT), prompt=[7]).token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_end_of_sequence_and_stop_strings_in_the_prompt_do_not_count(drafter: str) -> None:
    end = next(token for token in range(3, VOCAB) if token not in text())
    prompt = [end, *PROMPT, end]
    continuation = reference(shared("llama"), prompt, COUNT)
    at = continuation.index(end) + 1 if end in continuation else COUNT
    assert run(drafter, SamplingParams(max_tokens=COUNT), prompt=prompt, ends=end).token_ids == continuation[:at]
    # a stop string that begins in the prompt and would be complete with the first output token
    across = WORDS.decode([PROMPT[-1], text()[0]])
    after = WORDS.decode(text()).find(across)
    expected = text() if after < 0 else text()[: after + 2]
    assert run(drafter, SamplingParams(max_tokens=COUNT, stop=across)).token_ids == expected
