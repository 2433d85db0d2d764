"""Grammars are compiled in a process of their own, which is replaced if it dies or takes too long."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream import Constraint, UsageError
from slipstream.constraints import grammar_trial
from slipstream.constraints.grammar_text import LIMITS
from slipstream.constraints.grammar_trial import GrammarTrials, is_small
from tests.support.markers import mostly_exhaustive

HUGE = {
    "multiples": {"json_schema": {"type": "integer", "multipleOf": 99999989}},
    "intersections": {"grammar": "start: T\nT: " + " & ".join(f"/(.*[a-z]{{{at}}}.*)/" for at in range(1, 24))},
    "patterns": {"json_schema": {"allOf": [{"type": "string", "pattern": f"[a-z]{{{at}}}"} for at in range(1, 24)]}},
    "names": {"json_schema": {"patternProperties": {f"^a{at}[a-z]*b{at}$": {"type": "null"} for at in range(700)}}},
}


@pytest.fixture
def trials() -> GrammarTrials:
    return GrammarTrials()


def dying_process() -> subprocess.Popen[str]:
    """A process that reads one grammar and exits, like one that has reached a limit."""
    code = "import sys; sys.stdin.readline()"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def test_a_grammar_that_kills_its_process_is_refused_and_the_next_one_is_compiled(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(grammar_trial, "_start_process", dying_process)
        assert trials.of("start: /a{2}/").problem == grammar_trial.TIMED_OUT
    assert trials.of("start: /b{2}/").problem == ""
    assert trials.of("start: /a{2}/").problem == grammar_trial.TIMED_OUT  # a refused grammar is not tried again
    assert "unknown name" in trials.of("start: foo").problem
    trials.close()
    assert trials.of("start: /c{2}/").problem == ""
    trials.close()


def test_the_refusal_of_a_costly_grammar_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarTrials()
    monkeypatch.setattr(grammar_trial, "_trials", lambda: made)
    monkeypatch.setattr(grammar_trial, "_start_process", dying_process)
    why = "it takes more than 2 seconds or 256 MB to compile; allowed: a smaller or simpler one"
    with pytest.raises(UsageError, match=f"^constraint: regex: {why}$"):
        Constraint(regex="[a-z]{2,7}x")


def test_the_compiling_process_applies_the_limits() -> None:
    made = GrammarTrials()
    refused = made.of('start: "a" start')
    many = made.of("start: " + " | ".join(f'"{at}"' for at in range(LIMITS.row_items + 5)))
    assert "NoExtension" in refused.problem or "items" in refused.problem
    assert f"max is {LIMITS.row_items}" in many.problem
    made.close()


def test_only_ordinary_constraints_count_as_small() -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}'
    assert is_small("json_schema", schema) and is_small("regex", r"\d+") and is_small("choice", 'start: "a" | "b"')
    assert not is_small("regex", r"(\w{1,20} ?){1,25}") and not is_small("choice", "x" * 5000)
    assert not is_small("json_schema", '{"type": "integer", "multipleOf": 3}')


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", mostly_exhaustive(HUGE, "multiples")
)  # it reaches the limit of time, "names" of memory
def test_a_constraint_that_would_take_hours_to_compile_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"takes more than 2 seconds or 256 MB to compile; allowed"):
        Constraint(**HUGE[name])
    assert Constraint(regex="[a-z]{2,7}").megabytes >= 0
