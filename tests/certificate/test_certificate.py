"""The certificate passes what is exact and fails every rule that is not."""

import pytest

from slipstream import SpeculativeDecoder
from slipstream.certificate.checks import Check, Verifier
from slipstream.certificate.sampled_frequencies import distribution_test
from slipstream.certificate.wrong_rules import WRONG_RULES, load_wrong_rule
from slipstream.text.prompts import NamedPrompt

pytestmark = pytest.mark.slow

PROMPTS = [NamedPrompt("The heron looked at the"), NamedPrompt("A sparrow and a heron shared a river. The heron was")]


def checks(decoder: SpeculativeDecoder) -> list[Check]:
    return list(Verifier(decoder, PROMPTS, max_tokens=40, budget=3.0).run())


@pytest.mark.parametrize("acceptance", ["auto", "rejection", "block", "match"])
def test_every_lossless_rule_is_certified(acceptance: str) -> None:
    done = checks(SpeculativeDecoder("toy", "toy:2", acceptance=acceptance))
    assert [check for check in done if not check.passed] == []
    assert len(done) == 18


def test_lookup_is_certified() -> None:
    assert all(check.passed for check in checks(SpeculativeDecoder("toy", drafter="ngram")))


@pytest.mark.parametrize("name", sorted(WRONG_RULES))
def test_no_wrong_rule_is_certified(name: str) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2").using(acceptance=load_wrong_rule(name))
    failed = [check.name for check in checks(decoder) if not check.passed]
    assert failed, f"{name} passed every check"
    assert not any(name.startswith("power") for name in failed)


@pytest.mark.parametrize("rule", ["topk:5", "typical"])
def test_lossy_rules_do_not_keep_the_law(rule: str) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", acceptance=rule)
    assert not decoder.lossless
    prompt = decoder.encode("The heron was", chat=False)
    assert not distribution_test(decoder, prompt, 600).passed


def test_a_blind_law_test_is_reported_as_having_no_power() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    failed = [check.name for check in checks(decoder) if not check.passed]
    assert failed == ["power: first-mismatch-kept is caught"]
