"""A drafter and acceptance rules from a user's own module, named on the command line and in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from slipstream import Rule, SpeculativeDecoder, UsageError
from slipstream.core import user_objects
from slipstream.core.acceptance import RULES, load_rule, rejection
from tests.support.command_line import run
from tests.support.user_objects import users_module


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "unfinished.py").write_text("def propose(\n")
    with users_module(tmp_path, monkeypatch):
        yield


def test_a_drafter_by_name_drafts_and_leaves_the_text_alone() -> None:
    named = SpeculativeDecoder("toy", drafter="mine:Echo", num_draft_tokens=3)
    assert named.drafter_name == "mine:Echo" and named.traits.default_length == 4
    result = named.generate("The heron", max_tokens=30)
    assert result.stats.num_draft_tokens > 0
    assert result.token_ids == named.using("none").generate("The heron", max_tokens=30).token_ids


def test_a_policy_by_name_chooses_lengths_and_leaves_the_text_alone() -> None:
    prompt = "The heron, the heron, the heron"
    decoder = SpeculativeDecoder("toy", drafter="ngram", num_draft_tokens="mine:Halves")
    result = decoder.generate(prompt, max_tokens=30)
    lengths = [round.num_draft_tokens for round in result.rounds]
    assert max(lengths) == 4 and lengths[-1] < 4
    assert result.token_ids == decoder.using("none", num_draft_tokens="auto").generate(prompt, max_tokens=30).token_ids
    sampled = decoder.generate(prompt, max_tokens=30, temperature=0.8, seed=5).token_ids
    plain = decoder.using("none", num_draft_tokens="auto")
    assert sampled == plain.generate(prompt, max_tokens=30, temperature=0.8, seed=5).token_ids


def test_a_policys_wrong_lengths_end_the_request_with_its_name() -> None:
    decoder = SpeculativeDecoder("toy", drafter="ngram", num_draft_tokens="mine:TooMany")
    with pytest.raises(UsageError, match=r"policy mine:TooMany returned lengths \[\d+\]; allowed: a list of 1 whole"):
        decoder.generate("The heron", max_tokens=10)


Streams = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_benchmarks_take_own_drafters_and_rules_as_arms(capsys: Streams, monkeypatch: Patch) -> None:
    arms = "none,mine:Echo@3,ngram@3/mine:right~0.8,ngram@mine:Halves"
    options = ("--target", "toy", "--limit", "1", "--repeats", "1", "--json", "bench.json")
    code, out, errors = run(capsys, monkeypatch, "bench", *options, "--arms", arms)
    assert code == 0, errors
    assert "mine:Echo@3" in out and "ngram@3/mine:right" in out
    assert json.loads(Path("bench.json").read_text())


def test_the_enumeration_finds_the_wrong_rule_and_passes_the_right_one() -> None:
    from slipstream.certificate.rule_enumeration import first_fault

    assert first_fault(load_rule("mine:right"), 2, 64) is None
    assert first_fault(load_rule("mine:wrong"), 2, 64) is not None


def test_a_rule_object_is_an_argument_of_the_decoder() -> None:
    rule = Rule("mine", True, rejection)
    decoder = SpeculativeDecoder("toy", drafter="ngram", acceptance=rule)
    assert decoder.rule is rule and decoder.lossless
    assert decoder.generate("The heron", temperature=0.8, seed=1, max_tokens=10).token_ids


def test_entry_points_give_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "slipstream.drafters": EntryPoints([EntryPoint("echoes", "mine:Echo", "slipstream.drafters")]),
        "slipstream.acceptance_rules": EntryPoints([EntryPoint("mild", "mine:right", "slipstream.acceptance_rules")]),
        "slipstream.policies": EntryPoints([EntryPoint("halves", "mine:Halves", "slipstream.policies")]),
    }
    monkeypatch.setattr(user_objects, "entry_points", lambda *, group: points[group])
    decoder = SpeculativeDecoder("toy", drafter="echoes", acceptance="mild", num_draft_tokens="halves")
    assert decoder.drafter_name == "echoes" and decoder.lossless
    assert "mild" not in RULES  # nothing is registered under another's name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--drafter", "absent:Echo"),
            "drafter='absent:Echo': module 'absent' cannot be imported: ModuleNotFoundError",
        ),
        (("--drafter", "unfinished:Echo"), "module 'unfinished' cannot be imported: SyntaxError"),
        (("--drafter", "mine:Ecko"), "module 'mine' has no 'Ecko'; did you mean 'Echo'?"),
        (("--drafter", "mine:Broken"), "drafter='mine:Broken' cannot be made: RuntimeError: out of ideas"),
        (("--drafter", "mine:number"), "drafter='mine:number' cannot be made: TypeError"),
        (("--drafter", "mine"), "allowed: auto, "),
        (("--acceptance", "mine:Echo"), "acceptance='mine:Echo' is of type type; allowed: a Rule("),
        (("--num-draft-tokens", "mine:NoLengths"), "allowed: a subclass of slipstream.Policy"),
        (("--num-draft-tokens", "mine:Broken"), "num_draft_tokens='mine:Broken' cannot be made: RuntimeError"),
        (("--num-draft-tokens", "absent:Halves"), "num_draft_tokens='absent:Halves': module 'absent' cannot be"),
        (("--num-draft-tokens", "heuristic:many"), "num_draft_tokens='heuristic:many'; allowed: 'auto', 'chain'"),
        (("--acceptance", "mine:rihgt"), "did you mean 'right'?"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    flags: tuple[str, ...], message: str, capsys: Streams, monkeypatch: Patch
) -> None:
    code, _, errors = run(capsys, monkeypatch, "generate", "--target", "toy", "A", *flags)
    assert code == 2 and message in " ".join(errors.split()) and "Traceback" not in errors, errors
