"""How acceptance rules are written, read from the source: a wrong name is refused without PyTorch."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from slipstream.errors import UsageError, did_you_mean

COUPLED = ("match", "gumbel")  # rules that are no functions: every token is the target's own draw
WITH_COUNT = frozenset({"topk"})


def rule_names() -> tuple[str, ...]:
    """The rules of `slipstream.core.acceptance`."""
    source = ast.parse(Path(__file__).with_name("acceptance.py").read_text(encoding="utf-8"))
    calls = (one for one in ast.walk(source) if isinstance(one, ast.Call) and ast.unparse(one.func) == "rule")
    return (*COUPLED, *(str(ast.literal_eval(one.args[0])) for one in calls))


def check_rule(text: str, names: Collection[str]) -> None:
    """Refuse what names no rule, listing those that do, or a count that is missing, wrong or too much."""
    name, _, argument = text.partition(":")
    if name not in names or (":" in text) != (name in WITH_COUNT):
        allowed = ", ".join(["auto", *(f"{n}:K" if n in WITH_COUNT else n for n in sorted(names))])
        raise UsageError(f"acceptance={text!r}; allowed: {allowed}{did_you_mean(name, 'auto', *names)}")
    if name in WITH_COUNT and (not argument.isdecimal() or int(argument) < 1):
        raise UsageError(f"acceptance={text!r}; allowed: {name}:K with a whole number K >= 1")
