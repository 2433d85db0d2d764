"""Structured output: the text of plain constrained decoding with every drafter, always valid under its constraint."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import torch

from slipstream import Constraint, Result, SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError, drafters
from slipstream.core.types import Draft
from tests.support.embedded_model import loaded
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.structured_outputs import SCHEMAS, decoder, tokenizer

OTHER_DRAFTERS = [name for name in drafters.names() if name not in ("none", "cross_vocabulary", "model", "suffix")]
CONSTRAINTS = {name: Constraint(json_schema=schema) for name, schema in SCHEMAS.items()} | {
    "regex": Constraint(regex=r"[a-f]{2,9}(-[0-9]{1,3})?"),
    "choice": Constraint(choice=["red", "reddish", "green apples"]),
    "grammar": Constraint(grammar='start: item ("; " item){1,3}\nitem: /[a-z]{1,4}/ " = " /[0-9]{1,2}/'),
}
PROMPT, LONGEST = "a record of the city: ", 96


def params(name: str, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LONGEST, "constraint": CONSTRAINTS[name], **options})


MIXED = [
    request
    for at, name in enumerate(CONSTRAINTS)
    for request in (
        [params(name), params(name, temperature=1.3, seed=at, top_p=0.9)]
        + (
            [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=at)]
            if at % 5 == 0
            else []
        )
    )
]


def texts(name: str, acceptance: str = "match", params_list: list[SamplingParams] = MIXED) -> list[Result]:
    return decoder(name, acceptance).generate([PROMPT] * len(params_list), params_list, chat=False)


@pytest.fixture(scope="module")
def plain() -> list[Result]:
    return texts("none")


def is_valid(result: Result, constraint: Constraint | None) -> bool:
    if constraint is None:
        return True
    if constraint.json_schema is not None:
        checker = jsonschema.Draft202012Validator(
            constraint.json_schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        return bool(checker.is_valid(json.loads(result.text)))
    if constraint.choice is not None:
        return result.text in constraint.choice
    pattern = constraint.regex or r"[a-z]{1,4} = [0-9]{1,2}(; [a-z]{1,4} = [0-9]{1,2}){1,3}"
    return re.fullmatch(pattern, result.text) is not None


def test_every_finished_text_satisfies_its_constraint(plain: list[Result]) -> None:
    for result, options in zip(plain, MIXED, strict=True):
        assert result.finish_reason == ("length" if options.constraint is None else "stop"), result.error
        assert is_valid(result, options.constraint), result.text
    assert len({result.text for result in plain}) > len(CONSTRAINTS)  # sampled texts differ from the greedy ones


def test_the_prompt_without_a_constraint_does_not_satisfy_it() -> None:
    unconstrained = texts("none", params_list=[SamplingParams(max_tokens=8)])
    assert not is_valid(unconstrained[0], Constraint(choice=["red", "reddish"]))


@pytest.mark.parametrize("name", [*mostly_slow(["model", "suffix"], "suffix"), *mostly_exhaustive(OTHER_DRAFTERS)])
def test_every_drafter_gives_the_text_of_plain_decoding(name: str, plain: list[Result]) -> None:
    results = texts(name)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert [result.finish_reason for result in results] == [result.finish_reason for result in plain]
    assert sum(result.stats.num_forced_tokens for result in results) > 100
    assert sum(result.stats.num_rounds for result in results) < 0.8 * sum(result.stats.num_rounds for result in plain)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", mostly_exhaustive(["auto", "block", "rejection"], "block", "rejection"))
def test_sampled_drafts_give_valid_texts_and_leave_greedy_rows_unchanged(acceptance: str, plain: list[Result]) -> None:
    for result, options, expected in zip(texts("model", acceptance), MIXED, plain, strict=True):
        assert options.constraint is None or (result.finish_reason == "stop" and is_valid(result, options.constraint))
        if options.temperature == 0:
            assert result.token_ids == expected.token_ids


def test_constrained_texts_are_the_same_alone_and_in_a_batch(plain: list[Result]) -> None:
    for options, expected in list(zip(MIXED, plain, strict=True))[::5]:
        assert texts("suffix", params_list=[options])[0].token_ids == expected.token_ids


@pytest.mark.exhaustive
def test_frequencies_of_constrained_samples_follow_the_masked_target() -> None:
    """The frequencies of a few allowed texts agree with the products of their masked probabilities."""
    words, count = ["ab", "ac", "b"], 600
    options = SamplingParams(max_tokens=8, temperature=1.5, constraint=Constraint(choice=words))
    expected = probabilities(words, 1.5)
    for name, acceptance in (("model", "block"), ("ngram", "rejection")):
        seeded = [SamplingParams(**{**vars(options), "seed": seed}) for seed in range(count)]
        sampled = [result.text for result in texts(name, acceptance, seeded)]
        chi = sum((sampled.count(word) - count * expected[word]) ** 2 / (count * expected[word]) for word in words)
        assert chi < 23, (name, acceptance)  # 2 degrees of freedom: probability 1e-5
        uniform = sum((sampled.count(word) - count / 3) ** 2 / (count / 3) for word in words)
        assert uniform > 23  # negative control: another distribution is noticed


def probabilities(words: list[str], temperature: float) -> dict[str, float]:
    """The probability of each word, over all token sequences that spell it under the grammar."""
    from tests.support.structured_outputs import allowed, state

    end, total = tokenizer().eos_token_id, dict.fromkeys(words, 0.0)
    prompt = tokenizer().encode(PROMPT)

    def follow(output: list[int], weight: float) -> None:
        logits = decoder().next_logits(prompt + output).double() / temperature
        mask = torch.from_numpy(allowed(state(Constraint(choice=words)).masks(output, []))[0])
        chances = logits.masked_fill(~mask, float("-inf")).softmax(-1)
        for token in mask.nonzero()[:, 0].tolist():
            if token == end:
                total[tokenizer().decode(output)] += weight * float(chances[token])
            else:
                follow([*output, token], weight * float(chances[token]))

    follow([], 1.0)
    assert sum(total.values()) == pytest.approx(1.0)
    return total


def test_forced_tokens_are_counted_apart_from_drafted_ones() -> None:
    (result,) = texts("suffix", params_list=[params("call")])
    origins = [origin for round in result.rounds for origin in round.origins]
    stats = result.stats
    assert origins.count("forced") == stats.num_forced_tokens > len(origins) // 2
    assert origins.count("accepted") == stats.num_accepted_tokens
    assert stats.num_draft_tokens == sum(len(round.without_forced.draft) for round in result.rounds)
    for round in result.rounds:
        assert round.without_forced.forced == (0, 0) and round.without_forced.without_forced == round.without_forced
        assert len(round.draft) == len(round.without_forced.draft) + sum(round.forced)
    assert "forced by the constraint" in str(result.debug())


def test_plain_decoding_and_rows_without_drafts_force_no_tokens(plain: list[Result]) -> None:
    assert (
        sum(plain_result.stats.num_forced_tokens + plain_result.stats.num_draft_tokens for plain_result in plain) == 0
    )
    nothing = decoder().using("suffix", num_draft_tokens=0)
    (result,) = nothing.generate([PROMPT], [params("call")], chat=False)
    (per_request,) = texts("suffix", params_list=[params("call", num_draft_tokens=0)])
    assert result.stats.block_efficiency == per_request.stats.block_efficiency == 1.0
    assert result.token_ids == per_request.token_ids


class Stubborn:
    """Drafts the same tokens again and again, legal or not."""

    def propose(self, rows: Any, lengths: Any, sampler: Any) -> Draft:
        end = tokenizer().eos_token_id
        return Draft.from_lists([[end, 3, end, 447][:n] for n in lengths], sampler.device)


@pytest.mark.slow
def test_illegal_drafts_do_not_change_the_text(plain: list[Result]) -> None:
    for acceptance in ("match", "rejection"):
        stubborn = decoder().using(Stubborn(), acceptance=acceptance, num_draft_tokens=4)
        requests = [options for options in MIXED if options.temperature == 0]
        expected = [result.token_ids for result, options in zip(plain, MIXED, strict=True) if options.temperature == 0]
        results = stubborn.generate([PROMPT] * len(requests), requests, chat=False)
        assert [result.token_ids for result in results] == expected


@pytest.mark.slow
def test_a_dead_end_fails_its_row_alone(plain: list[Result]) -> None:
    digits = {token: float("-inf") for token in range(448) if any(c.isdigit() for c in tokenizer().decode([token]))}
    for name in ("none", "suffix", "model"):
        dead = texts(name, params_list=[MIXED[0], params("all_of", logit_bias=digits), MIXED[1]])
        assert [result.finish_reason for result in dead] == ["stop", "error", "stop"]
        assert "the constraint and the other sampling options leave no token" in str(dead[1].error)
        assert [dead[0].token_ids, dead[2].token_ids] == [plain[0].token_ids, plain[1].token_ids]
        with pytest.raises(SlipstreamError, match="leave no token"):
            decoder(name, "match").generate(PROMPT, params("all_of", logit_bias=digits), chat=False)


def test_a_processor_that_overrules_the_constraint_fails_its_row() -> None:
    def overrule(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).index_fill_(-1, torch.tensor([7]), 1.0)

    for name in ("none", "suffix"):
        (result,) = texts(name, params_list=[params("choice", logits_processors=[overrule])])
        assert result.finish_reason == "error" and result.token_ids == [7]
        assert result.error == "token 7 of the text is not one that the constraint allows"


def test_max_tokens_stop_strings_and_min_tokens_apply_under_a_constraint() -> None:
    for name in ("none", "suffix"):
        (cut,) = texts(name, params_list=[params("record", max_tokens=7)])
        assert cut.finish_reason == "length" and len(cut.token_ids) == 7
        (stopped,) = texts(name, params_list=[params("record", stop=['"age"'])])
        assert stopped.finish_reason == "stop" and stopped.text.endswith(",") and '"age"' not in stopped.text
        later = SamplingParams(min_tokens=3, max_tokens=40, constraint=Constraint(choice=["q", "qzqzqzqz"]))
        (longer,) = texts(name, params_list=[later])  # the shorter one ends with its second token
        assert longer.finish_reason == "stop" and longer.text == "qzqzqzqz"
        (never,) = texts(name, params_list=[params("choice", min_tokens=60)])
        assert never.finish_reason == "error" and "leave no token" in str(never.error)


def test_several_constrained_texts_have_logprobs_of_the_raw_logits() -> None:
    for name in ("none", "suffix"):
        first = decoder(name, "match").generate(
            PROMPT, params("record", temperature=1.0, seed=3, n=3, logprobs=2), chat=False
        )
        results = [first, *first.alternatives]
        assert len({result.text for result in results}) == 3
        for result in results:
            assert is_valid(result, CONSTRAINTS["record"]) and result.logprobs is not None
            assert [entry.token_id for entry in result.logprobs] == result.token_ids
        first_entry = first.logprobs[0]
        logits = decoder().next_logits(tokenizer().encode(PROMPT)).float().log_softmax(-1)
        assert first_entry.logprob == pytest.approx(float(logits[first_entry.token_id]), abs=1e-4)


@pytest.mark.parametrize("name", ["none", "suffix", "model"])
def test_penalties_and_bad_words_apply_under_a_constraint(name: str) -> None:
    options = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "bad_words": [tokenizer().encode("e")]}
    requests = [params("regex", **options), params("record", temperature=1.0, seed=1, **options)]
    results = texts(name, params_list=requests)
    assert [result.token_ids for result in results] == [
        result.token_ids for result in texts("none", params_list=requests)
    ]
    assert all(
        is_valid(result, request_params.constraint) for result, request_params in zip(results, requests, strict=True)
    )


def test_trees_are_verified_under_a_constraint(plain: list[Result]) -> None:
    branching = decoder().using("token_recycling", num_draft_tokens="3x2", acceptance="match", reproducible=False)
    requests, expected = MIXED[:12], plain[:12]
    results = branching.generate([PROMPT] * 12, requests, chat=False)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert any(round.parents is not None for result in results for round in result.rounds)


def test_streams_and_cancelled_rows_work_under_a_constraint() -> None:
    chunks = list(decoder("suffix", "match").stream(PROMPT, params("record"), chat=False))
    assert is_valid(texts("none", params_list=[params("record")])[0], CONSTRAINTS["record"])
    assert "".join(chunk.text for chunk in chunks) == texts("none", params_list=[params("record")])[0].text
    rows = decoder("suffix", "match").rows([PROMPT] * 2, [params("record"), params("nested")], chat=False)
    scheduler = decoder("suffix", "match").scheduler()
    for row in rows:
        scheduler.add(row)
    scheduler.step()
    scheduler.cancel(rows[1])
    while scheduler.unfinished:
        scheduler.step()
    assert rows[0].output == texts("none", params_list=[params("record")])[0].token_ids
    assert rows[1].finish_reason == "cancelled"


def test_reproducible_mode_gives_the_same_text() -> None:
    from tests.support.structured_outputs import model

    requests, made = [params("record"), params("call", temperature=0.8, seed=2)], []
    for name in ("none", "suffix"):
        fixed = SpeculativeDecoder(model(), tokenizer=tokenizer(), drafter=name, acceptance="match", reproducible=True)
        made.append([result.token_ids for result in fixed.generate([PROMPT] * 2, requests, chat=False)])
    assert made[0] == made[1]


def test_a_model_without_end_or_tokenizer_is_refused() -> None:
    import copy

    from tests.support.structured_outputs import model

    endless = copy.deepcopy(model())
    endless.generation_config.eos_token_id = endless.config.eos_token_id = None
    with pytest.raises(UsageError, match=r"^constraint: .* has no end token.*allowed"):
        SpeculativeDecoder(endless).generate([1, 2], params("regex"))
    with pytest.raises(UsageError, match=r"^constraint: .* has no tokenizer; allowed"):
        SpeculativeDecoder(model()).generate([1, 2], params("regex"))


@pytest.mark.exhaustive
@pytest.mark.smollm2
@pytest.mark.parametrize("name", ["suffix", pytest.param("token_recycling", marks=pytest.mark.exhaustive)])
def test_smollm2_satisfies_constraints(name: str) -> None:
    target = loaded().using("none")
    requests = [
        params("record"),
        params("call"),
        params("nested", temperature=0.7, seed=1),
        SamplingParams(max_tokens=20),
    ]
    prompt = "Describe a person or a place as JSON."
    expected = target.generate([prompt] * 4, requests)
    results = target.using(name, acceptance="match").generate([prompt] * 4, requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert all(is_valid(result, options.constraint) for result, options in zip(results, requests, strict=True))
    assert sum(result.stats.num_forced_tokens for result in results) > 20
