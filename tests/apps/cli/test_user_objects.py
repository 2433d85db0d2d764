"""A drafter and acceptance rules from a user's own module, named on the command line and in Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from slipstream import Rule, SpeculativeDecoder
from slipstream.core import user_objects
from slipstream.core.acceptance import RULES, load_rule, rejection
from tests.support.command_line import run

MODULE = '''
from slipstream import Distributions, Draft, Rule, Traits
from slipstream.core.acceptance import rejection, topk


class Echo:
    """Proposes the row's newest tokens again."""

    traits = Traits(samples=False, needs_forwards=False, default_length=4)

    def __init__(self, setup):
        self.device = setup.device

    def propose(self, rows, lengths, sampler):
        return Draft.from_lists([row.tokens[-n:] if n else [] for row, n in zip(rows, lengths)], self.device)


class Broken:
    def __init__(self):
        raise RuntimeError("out of ideas")


right = Rule("right", True, rejection)
wrong = Rule("wrong", True, lambda p, scores, draft: topk(p, scores, draft, k=2))
number = 7
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "unfinished.py").write_text("def propose(\n")
    monkeypatch.chdir(tmp_path)
    for cache in (user_objects.user_object, user_objects._installed, load_rule):
        cache.cache_clear()
    yield
    sys.modules.pop("mine", None)
    for cache in (user_objects.user_object, user_objects._installed, load_rule):
        cache.cache_clear()


def test_a_drafter_by_name_drafts_and_leaves_the_text_alone() -> None:
    named = SpeculativeDecoder("toy", drafter="mine:Echo", num_draft_tokens=3)
    assert named.drafter_name == "mine:Echo" and named.traits.default_length == 4
    result = named.generate("The heron", max_tokens=30)
    assert result.stats.num_draft_tokens > 0
    assert result.token_ids == named.using("none").generate("The heron", max_tokens=30).token_ids


Streams = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_benchmarks_take_own_drafters_and_rules_as_arms(capsys: Streams, monkeypatch: Patch) -> None:
    arms = "none,mine:Echo@3,ngram@3/mine:right~0.8"
    options = ("--target", "toy", "--limit", "1", "--repeats", "1", "--json", "bench.json")
    code, out, errors = run(capsys, monkeypatch, "bench", *options, "--arms", arms)
    assert code == 0, errors
    assert "mine:Echo@3" in out and "ngram@3/mine:right" in out
    assert json.loads(Path("bench.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "verdict", "code"), [("right", "VERIFIED", 0), ("wrong", "FAILED", 1)])
def test_verify_judges_an_own_rule(rule: str, verdict: str, code: int, capsys: Streams, monkeypatch: Patch) -> None:
    options = ("--target", "toy", "--drafter", "ngram", "--num-draft-tokens", "2", "--limit", "1", "--budget", "5")
    named = ("--acceptance", f"mine:{rule}", "--json", "certificate.json")
    assert run(capsys, monkeypatch, "verify", *options, *named)[0] == code
    assert json.loads(Path("certificate.json").read_text())["verdict"] == verdict


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
    }
    monkeypatch.setattr(user_objects, "entry_points", lambda *, group: points[group])
    decoder = SpeculativeDecoder("toy", drafter="echoes", acceptance="mild")
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
        (("--acceptance", "mine:rihgt"), "did you mean 'right'?"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    flags: tuple[str, ...], message: str, capsys: Streams, monkeypatch: Patch
) -> None:
    code, _, errors = run(capsys, monkeypatch, "generate", "--target", "toy", "A", *flags)
    assert code == 2 and message in " ".join(errors.split()) and "Traceback" not in errors, errors
