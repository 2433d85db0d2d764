"""Allowed values of a round's settings. Needs no PyTorch, so that a wrong value is refused before that is loaded."""

from __future__ import annotations

from slipstream.core.user_objects import is_users
from slipstream.errors import UsageError, did_you_mean

MAX_DRAFT_TOKENS = 64  # of one row in one round
RULE_NAMES = ("match", "rejection", "block", "topk", "typical")  # of acceptance rules
WITH_COUNT = frozenset({"topk"})  # rules that need a number, as in "topk:10"


def check_rule(text: str) -> None:
    """Raise UsageError, which lists the rules, for an unknown one or a count that is missing, wrong or superfluous."""
    name, _, argument = text.partition(":")
    if name not in RULE_NAMES and is_users("acceptance", text):
        return
    if name not in RULE_NAMES or (":" in text) != (name in WITH_COUNT):
        names = (f"{n}:K" if n in WITH_COUNT else n for n in sorted(RULE_NAMES))
        allowed = ", ".join(["auto", *names, "MODULE:RULE"])
        raise UsageError(f"acceptance={text!r}; allowed: {allowed}{did_you_mean(name, 'auto', *RULE_NAMES)}")
    if name in WITH_COUNT and (not argument.isdecimal() or int(argument) < 1):
        raise UsageError(f"acceptance={text!r}; allowed: {name}:K with a whole number K, 1 or more")
