"""A user's own module, with a drafter, policies and acceptance rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.core import user_objects
from slipstream.core.acceptance import load_rule

MODULE = '''
from slipstream import Distributions, Draft, Policy, Rule, Traits
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


class Halves(Policy):
    """Asks for half of the tokens for which there is room, but no more than four."""

    def lengths(self, rows, source, draft, room):
        return [min(4, n // 2) for n in room]


class TooMany(Policy):
    def lengths(self, rows, source, draft, room):
        return [n + 1 for n in room]


class NoLengths:
    pass


right = Rule("right", True, rejection)
wrong = Rule("wrong", True, lambda p, scores, draft: topk(p, scores, draft, k=2))
number = 7
'''


@contextmanager
def users_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module as mine.py in the current folder, which is this one."""
    (folder / "mine.py").write_text(MODULE)
    monkeypatch.chdir(folder)
    caches = (user_objects.user_object, user_objects._installed, load_rule)
    for cache in caches:
        cache.cache_clear()
    yield
    sys.modules.pop("mine", None)
    for cache in caches:
        cache.cache_clear()
