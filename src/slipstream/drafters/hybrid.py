"""Two drafters in one: text that was seen before is looked up, the rest is drafted by the draft model.

A looked-up draft costs nothing, a draft model's costs a forward per token, so the look-up goes first wherever it can be
expected to be worth more than `WORTH` tokens. What to expect is its length times the share of such drafts that came
true in this row; and since a look-up can be compared with the text whether it was used or not, a row that leaves
familiar ground is noticed at once, and so is one that comes back to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from slipstream.drafters import Drafter, Learner, Setup, model, suffix
from slipstream.sampling import Sampler
from slipstream.types import Draft, Row, UsageError

STEPS = 6  # tokens the draft model drafts at most; it stops early
WORTH = 1.2  # tokens a looked-up draft must be expected to add
PRIOR = 0.6  # share of a looked-up draft that comes true in a text of which nothing is known
MEMORY = 0.7  # weight of what was known, per look-up that could be compared


@dataclass
class _Trust:
    """How far look-ups can be relied on in one row. start: where the last one, `tokens`, should have stood."""

    share: float = PRIOR
    start: int = 0
    tokens: list[int] = field(default_factory=list)

    def compare(self, text: Sequence[int]) -> None:
        """Learn from what the text became where the last look-up should have stood."""
        came = text[self.start : self.start + len(self.tokens)]
        if not came:
            return
        right = next((i for i, token in enumerate(came) if token != self.tokens[i]), len(came))
        # a wrong token ends what can be said about those behind it; a text that ended early says nothing against them
        judged = len(came) if right == len(came) else len(self.tokens)
        self.share = MEMORY * self.share + (1 - MEMORY) * right / judged


@dataclass
class HybridDrafter:
    """Takes `first`'s draft for a row where it can be expected to add WORTH tokens, else `second`'s of <= `steps`.

    Drafts of `first` must be one-hot. A round in which every row has a good look-up costs no forward of `second`;
    else it drafts for the whole batch at once.
    """

    first: Drafter
    second: Drafter
    steps: int = STEPS
    _trust: WeakKeyDictionary[Row, _Trust] = field(default_factory=WeakKeyDictionary, repr=False)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the draft of one of the two."""
        known = self.first.propose(rows, lengths, sampler)
        if known.probs is not None:
            raise UsageError(f"hybrid: {type(self.first).__name__} draws its drafts; allowed: one that looks them up")
        use = [self._relied_on(*one) for one in zip(rows, known.tokens.tolist(), known.lengths, lengths, strict=True)]
        if all(use):
            return known
        wanted = [0 if looked_up else min(length, self.steps) for looked_up, length in zip(use, lengths, strict=True)]
        return _merged(use, known, self.second.propose(rows, wanted, sampler))

    def forget(self) -> None:
        """Drop what either learned from requests."""
        for drafter in (self.first, self.second):
            if isinstance(drafter, Learner):
                drafter.forget()

    def _relied_on(self, row: Row, tokens: list[int], length: int, wanted: int) -> bool:
        trust = self._trust.setdefault(row, _Trust())
        trust.compare(row.tokens)
        trust.start, trust.tokens = len(row.tokens), tokens[:length]
        return wanted == 0 or length * trust.share >= min(WORTH, PRIOR * wanted)


def _merged(use: Sequence[bool], known: Draft, drafted: Draft) -> Draft:
    """Rows of `known` where `use` says so, else of `drafted`."""
    width = max(known.width, drafted.width)
    first = torch.tensor(use).to(known.tokens.device, non_blocking=True)
    tokens = torch.where(first[:, None], _widened(known.tokens, width), _widened(drafted.tokens, width))
    lengths = tuple(a if own else b for own, a, b in zip(use, known.lengths, drafted.lengths, strict=True))
    if drafted.probs is None:
        return Draft(tokens, lengths)
    sure = one_hot(tokens, drafted.probs.shape[-1]).to(drafted.probs.dtype)
    drawn = pad(drafted.probs, (0, 0, 0, width - drafted.width))
    return Draft(tokens, lengths, torch.where(first[:, None, None], sure, drawn))


def _widened(tokens: Tensor, width: int) -> Tensor:
    return pad(tokens, (0, width - tokens.shape[1]))


def build(setup: Setup, argument: str) -> HybridDrafter:
    """ "hybrid", "hybrid:STEPS" or "hybrid:STEPS+SUFFIX", where SUFFIX is an argument of the drafter `suffix`.

    Without one it looks things up in the row's own text only, so that a seed gives the same sampled text every time.
    """
    given = re.fullmatch(r"(\d*)(?:\+(.+))?", argument)
    steps = STEPS if given is None or not given[1] else int(given[1])
    if given is None or steps < 1:
        raise UsageError(
            f"drafter='hybrid:{argument}'; allowed: hybrid, hybrid:STEPS with at least 1 token of the draft model, and "
            "+ an argument of the drafter suffix"
        )
    if setup.session is None:
        raise UsageError("drafter='hybrid' needs a draft model; give draft=... (command line: --draft)")
    drafting = model.build(replace(setup, stops_early=setup.device.type == "cpu"), "")
    return HybridDrafter(suffix.build(setup, given[2] or "outputs=0"), drafting, steps)
