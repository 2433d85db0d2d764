"""The certificate passes exact rules and fails every inexact one."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from slipstream import SpeculativeDecoder
from slipstream.certificate import sampled_frequencies
from slipstream.certificate.checks import OPTIONS, Check, DistributionChecks, TextChecks, Verifier
from slipstream.certificate.sampled_frequencies import Target, distribution_test
from slipstream.sampling.processors import BadWords, BatchProcessor, FixedBias, MinTokens
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.wrong_acceptance_rules import WRONG_RULES, load_wrong_rule

pytestmark = pytest.mark.slow

COUPLED = ["seeded text, one by one"]
COUPLED += [f"option {name}" for name, options in OPTIONS.items() if options.get("temperature")]
PROMPTS = [NamedPrompt("The heron looked at the"), NamedPrompt("A sparrow and a heron shared a river. The heron was")]


def checks(decoder: SpeculativeDecoder) -> list[Check]:
    """The checks with the shortest texts and a fixed, small number of runs, however busy the machine is."""
    return list(Verifier(decoder, PROMPTS, max_tokens=40, budget=0.0).run())


@pytest.mark.parametrize("acceptance", ["auto", "rejection", "block", "match"])
def test_every_lossless_rule_is_certified(acceptance: str) -> None:
    results = checks(SpeculativeDecoder("toy", "toy:2", acceptance=acceptance))
    assert [check for check in results if check.failed] == []
    assert len(results) == 19
    couples = acceptance in ("auto", "match")
    skipped = [check.name for check in results if check.outcome == "not applicable"]
    assert skipped == ([] if couples else COUPLED) and sum(check.passed for check in results) == 19 - len(skipped)


@pytest.mark.parametrize("shape", ["2x2", "4x2"])
def test_trees_are_certified(shape: str) -> None:
    results = checks(SpeculativeDecoder("toy", "toy:2", num_draft_tokens=shape, acceptance="match"))
    assert [check.name for check in results if not check.passed] == [] and len(results) == 19


def test_ngram_drafts_are_certified() -> None:
    assert all(check.passed for check in checks(SpeculativeDecoder("toy", drafter="ngram")))


@pytest.mark.parametrize("name", sorted(WRONG_RULES))
def test_no_wrong_rule_is_certified(name: str) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2").using(acceptance=load_wrong_rule(name))
    failed = [check.name for check in checks(decoder) if check.failed]
    assert failed, f"{name} passed every check"
    assert not any(name.startswith("power") for name in failed)


@pytest.mark.parametrize("rule", ["topk:5", "typical"])
def test_lossy_rules_fail_the_distribution_test(rule: str) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", acceptance=rule)
    assert not decoder.lossless
    target = Target.of(decoder, decoder.encode("The heron was", chat=False))
    assert not distribution_test([decoder], [target], 600).passed


FIXED, WORDS, MINIMUM = FixedBias.apply, BadWords.apply, MinTokens.apply
BLIND: dict[str, tuple[type[BatchProcessor], Callable[..., None]]] = {
    "logit_bias": (FixedBias, lambda self, scores, draft, first: FIXED(self, scores[:, :1], draft, first)),
    "bad_words": (BadWords, lambda self, scores, draft, first: WORDS(self, scores, draft * 0, first)),
    "min_tokens": (MinTokens, lambda self, scores, draft, first: MINIMUM(self, scores[:, :1], draft, first)),
}


@pytest.mark.parametrize("name", BLIND)
def test_an_option_that_ignores_the_draft_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", num_draft_tokens=6)
    texts = TextChecks(decoder, PROMPTS, max_tokens=40, budget=0.0)
    assert texts.option(name).outcome == "pass"
    kind, blind = BLIND[name]
    monkeypatch.setattr(kind, "apply", blind)
    assert texts.option(name).outcome == "FAIL"


def test_the_stop_string_of_its_check_comes_after_drafts() -> None:
    texts = TextChecks(SpeculativeDecoder("toy", "toy:2", num_draft_tokens=4), PROMPTS, max_tokens=40, budget=0.0)
    finding = texts.option("stop")
    assert finding.outcome == "pass" and int(finding.detail.split()[-3]) >= 4  # of "..., N tokens drafted"


def test_a_distribution_test_without_drafts_is_reported_as_powerless() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    failed = [check.name for check in checks(decoder) if check.failed]
    assert failed == ["power: first-mismatch-kept is caught", "power: bonus-from-raw-logits is caught"]


def test_a_test_that_misses_a_raw_bonus_token_is_reported_as_powerless(monkeypatch: pytest.MonkeyPatch) -> None:
    # without options that change logits, a bonus token from the raw logits is right and cannot be caught
    params = replace(sampled_frequencies.PARAMS, top_k=0, temperature=1.0, max_tokens=2)
    monkeypatch.setattr(sampled_frequencies, "PARAMS", params)
    monkeypatch.setattr(sampled_frequencies, "TOKENS", 2)
    distribution_checks = DistributionChecks(SpeculativeDecoder("toy", "toy:2"), 0.0)
    assert distribution_checks.power("first-mismatch-kept").outcome == "pass"
    assert distribution_checks.power("bonus-from-raw-logits").outcome == "FAIL"


def test_a_check_that_does_not_apply_is_neither_passed_nor_failed() -> None:
    check = Check("c", "not applicable", "no tokenizer", 0.0)
    assert not check.passed and not check.failed and check.to_dict()["passed"] is None
