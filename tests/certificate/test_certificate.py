"""The certificate passes exact rules and fails every inexact one."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.certificate.checks import OPTIONS, Check, LawChecks, TextChecks, Verifier, target_logits, verdict_on
from slipstream.certificate.rule_enumeration import OPTIONS as ENUMERATED
from slipstream.certificate.rule_enumeration import Case, error_of
from slipstream.certificate.sampled_law import FALSE_ALARM, bound_of, evidence_of, filtered, kept_from
from slipstream.core.acceptance import Rule, load_rule
from slipstream.core.rng import WarpOptions
from slipstream.sampling.processors import BadWords, BatchProcessor, FixedBias, MinTokens
from slipstream.sampling.warpers import Warp
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.markers import mostly_exhaustive

COUPLED = ["seeded text, one by one", "planned drafts, seeded"]
COUPLED += [f"option {name}" for name, options in OPTIONS.items() if options.get("temperature")]
PROMPTS = [NamedPrompt("The heron looked at the"), NamedPrompt("A sparrow and a heron shared a river. The heron was")]


def checks(decoder: SpeculativeDecoder) -> list[Check]:
    """The checks with the shortest texts and a fixed, small number of runs, however busy the machine is."""
    return list(Verifier(decoder, PROMPTS, max_tokens=24, budget=0.0).run())


@pytest.mark.slow
def test_ngram_drafts_are_certified() -> None:
    results = checks(SpeculativeDecoder("toy", drafter="ngram", num_draft_tokens=3))
    assert [check for check in results if check.failed] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("acceptance", mostly_exhaustive(["block", "match"], "block"))
def test_what_a_rule_cannot_show_is_not_applicable(acceptance: str) -> None:
    results = checks(SpeculativeDecoder("toy", "toy:2", acceptance=acceptance, num_draft_tokens=4))
    assert [check for check in results if check.failed] == []
    skipped = [check.name for check in results if check.outcome == "not applicable"]
    enumerated = ["rule, by enumeration", "power: rules wrong at one depth", "distribution, likely drafts"]
    assert sorted(skipped) == sorted(COUPLED if acceptance == "block" else enumerated)


@pytest.mark.parametrize("rule", ["typical", "topk:3", Rule("mine", False, load_rule("rejection").distributions)])
def test_a_rule_that_calls_itself_lossy_is_never_verified(rule: str | Rule) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2").using(acceptance=rule)
    assert verdict_on(decoder, [Check("c", "pass", "", 0.0)]) == "LOSSY"
    assert verdict_on(decoder, [Check("c", "FAIL", "", 0.0)]) == "LOSSY"


def test_a_failed_check_fails_the_certificate() -> None:
    passed, failed = Check("c", "pass", "", 0.0), Check("c", "FAIL", "", 0.0)
    decoder = SpeculativeDecoder("toy", "toy:2")
    assert verdict_on(decoder, [passed]) == "VERIFIED" and verdict_on(decoder, [passed, failed]) == "FAILED"


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("options", ENUMERATED)
def test_enumeration_finds_lossless_rules_exact_and_a_fault_at_any_depth(name: str, options: str) -> None:
    right = load_rule(name).distributions
    assert right is not None
    for length in (1, 7, 40):
        for one_hot in (True, False):
            assert error_of(right, Case(length, options, one_hot)) < 1e-5
    assert error_of(kept_from(39), Case(40, "temperature 1", one_hot=False)) > 1e-2


@pytest.mark.parametrize(
    "params",
    [WarpOptions(0.7), WarpOptions(1.5, top_k=3), WarpOptions(1.0, top_p=0.8), WarpOptions(1.3, 20, 0.9, 0.05)],
)
def test_the_filters_of_the_certificate_agree_with_the_engines(params: WarpOptions) -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)) * 3
    expected = Warp(params, logits.device)(logits)
    computed = torch.stack([filtered(row, params) for row in logits])
    torch.testing.assert_close(computed.float(), expected, atol=1e-6, rtol=1e-4)


def test_right_frequencies_rarely_have_a_small_bound_and_wrong_ones_do() -> None:
    random = Random(5)

    def bound(true: float, assumed: float) -> float:
        happened = torch.tensor([random.random() < true for _ in range(500)])
        return bound_of(evidence_of(happened, torch.full((500,), assumed)).sum(0))

    right = [bound(chance, chance) for chance in (0.001, 0.02, 0.5, 0.9) for _ in range(250)]
    assert sum(value < 0.01 for value in right) <= 10 and min(right) > FALSE_ALARM
    assert bound(0.5, 0.3) < FALSE_ALARM and bound(0.05, 0.001) < FALSE_ALARM and bound(0.0, 0.05) < FALSE_ALARM


def test_a_target_that_its_drafter_changes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PROMPTS[:1]
    alone = target_logits(SpeculativeDecoder("toy", drafter="none"), prompts)
    decoder = SpeculativeDecoder("toy", "toy:2")
    verifier = Verifier(decoder, prompts, budget=0.0, alone=alone)
    check = verifier.checks["target with and without drafter"]
    assert check().passed
    backend: Any = decoder.target.backend
    forward = backend.forward
    monkeypatch.setattr(backend, "forward", lambda *args, **options: forward(*args, **options) * (1 + 1e-6))
    assert check().passed is False


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
    assert texts.option(name).passed
    kind, blind = BLIND[name]
    monkeypatch.setattr(kind, "apply", blind)
    assert texts.option(name).passed is False


def test_the_stop_string_of_its_check_comes_after_drafts() -> None:
    texts = TextChecks(SpeculativeDecoder("toy", "toy:2", num_draft_tokens=4), PROMPTS, max_tokens=40, budget=0.0)
    finding = texts.option("stop")
    assert finding.passed and int(finding.detail.split()[-3]) >= 4  # of "..., N tokens drafted"


def test_without_drafts_nothing_is_certified() -> None:
    verifier = Verifier(SpeculativeDecoder("toy", drafter="none"), PROMPTS, max_tokens=40, budget=0.0)
    assert verifier.checks["distribution of sampled text"]().passed is False


def test_a_test_that_misses_a_raw_bonus_token_is_reported_as_powerless(monkeypatch: pytest.MonkeyPatch) -> None:
    # without options that change logits, a bonus token from the raw logits is right and cannot be caught
    monkeypatch.setattr(LawChecks, "_params", [SamplingParams(temperature=1.0)])
    laws = LawChecks(SpeculativeDecoder("toy", "toy:2", num_draft_tokens=2), 0.0)
    assert laws.power("first-mismatch-kept").passed
    assert laws.power("bonus-from-raw-logits").passed is False


def test_a_check_that_does_not_apply_is_neither_passed_nor_failed() -> None:
    check = Check("c", "not applicable", "no tokenizer", 0.0)
    assert not check.passed and not check.failed and check.to_dict()["passed"] is None
