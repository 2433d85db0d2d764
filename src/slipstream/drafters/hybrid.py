"""Two drafters in one: text that was seen before is looked up, the rest is drafted by the draft model.

A looked-up draft costs nothing but its verification, a draft model's a forward per token. The look-up says how likely
it is to come true, from how such tokens fared in this row, whether they were used or not; so a row that leaves familiar
ground is noticed at once, and so is one that comes back to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from slipstream.core.interfaces import Continuation, Drafter, Learner
from slipstream.core.types import Draft, Row
from slipstream.draft_length.controller import DraftController
from slipstream.drafters import Setup, model, suffix
from slipstream.errors import UsageError
from slipstream.sampling.sampler import Sampler

STEPS = 6  # tokens the draft model drafts at most, where costs are not known
WORTH = 1.2  # tokens a looked-up draft must then be expected to add, or
SHARE = 0.6  # this share of what is asked for
STOP = "p=40"  # the draft model's argument then
LEAST = 0.2  # and then it ends where it is less likely than this to come true


@dataclass
class HybridDrafter:
    """Takes `first`'s draft for a row or `second`'s, whichever promises more.

    Drafts of `first` must be one-hot and say what to hope for. A round in which every row is looked up costs no
    forward of `second`; else it drafts for the whole batch at once. With `control` costs decide, and may decide for
    neither; without it, or where sampled text depends on the draft, a look-up is used if it can be expected to add
    WORTH tokens.
    steps: tokens of `second` at most. drawn: whether `second` draws by dice of its own for sampled rows.
    """

    first: Drafter
    second: Drafter
    steps: int = STEPS
    controller: DraftController | None = None
    drawn: bool = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the draft of one of the two."""
        known = self.first.propose(rows, lengths, sampler)
        if known.probs is not None or known.acceptance_probs is None:
            what = "draws its drafts" if known.probs is not None else "does not say what to hope for"
            raise UsageError(f"hybrid: {type(self.first).__name__} {what}; allowed: a drafter that looks them up")
        acceptance_probs = [acceptance_prob or () for acceptance_prob in known.acceptance_probs]
        controller = None if self._steady(rows) else self.controller
        if controller is None:
            known = replace(
                known.cut([sum(one >= LEAST for one in acceptance_prob) for acceptance_prob in acceptance_probs]),
                acceptance_probs=None,
            )
            use = [
                n == 0 or sum(acceptance_prob[:n]) >= min(WORTH, SHARE * n)
                for acceptance_prob, n in zip(acceptance_probs, lengths, strict=True)
            ]
        else:
            use = [not model for model in controller.prefer_model(rows, acceptance_probs, lengths)]
        if all(use):
            return known
        wanted = [0 if looked_up else min(length, self.steps) for looked_up, length in zip(use, lengths, strict=True)]
        drafted = self.second.propose(rows, wanted, sampler)
        if isinstance(self.first, Continuation) and drafted.acceptance_probs is not None and drafted.probs is None:
            drafted = _continued(self.first, rows, lengths, drafted)
        known = known.cut([n if looked_up else 0 for looked_up, n in zip(use, known.lengths, strict=True)])
        return _merged(use, known, drafted)

    def forget(self) -> None:
        """Drop what either learned from requests."""
        for drafter in (self.first, self.second):
            if isinstance(drafter, Learner):
                drafter.forget()

    def _steady(self, rows: Sequence[Row]) -> bool:
        """Whether drafts must depend on nothing but the rows."""
        return self.drawn and any(row.params.temperature > 0 for row in rows)


def _continued(by: Continuation, rows: Sequence[Row], lengths: Sequence[int], draft: Draft) -> Draft:
    """The draft with what a look-up finds behind it; its tokens are on the host already, or it could not say hopes."""
    assert draft.acceptance_probs is not None
    proposals, acceptance_probs = [], []
    for row, most, tokens, length, known in zip(
        rows, lengths, draft.tokens.tolist(), draft.lengths, draft.acceptance_probs, strict=True
    ):
        more, more_probs = list[int](), list[float]()
        if known:
            more, more_probs = by.goes_on(row, tokens[:length], most - length, known[-1])
        proposals.append(tokens[:length] + more)
        acceptance_probs.append(None if known is None else [*known, *more_probs])
    longer = Draft.from_lists(proposals, draft.tokens.device)
    return replace(longer, acceptance_probs=tuple(acceptance_probs), steps=draft.steps)


def _merged(use: Sequence[bool], known: Draft, drafted: Draft) -> Draft:
    """Rows of `known` where `use` says so, else of `drafted`."""
    width = max(known.width, drafted.width)
    first = torch.tensor(use).to(known.tokens.device, non_blocking=True)
    tokens = torch.where(first[:, None], _widened(known.tokens, width), _widened(drafted.tokens, width))
    lengths = tuple(a if own else b for own, a, b in zip(use, known.lengths, drafted.lengths, strict=True))
    nothing = [None] * len(use)
    both = zip(use, known.acceptance_probs or nothing, drafted.acceptance_probs or nothing, strict=True)
    merged = Draft(tokens, lengths, None, tuple(a if own else b for own, a, b in both), drafted.steps)
    if drafted.probs is None:
        return merged
    sure = one_hot(tokens, drafted.probs.shape[-1]).to(drafted.probs.dtype)
    drawn = pad(drafted.probs, (0, 0, 0, width - drafted.width))
    return replace(merged, probs=torch.where(first[:, None, None], sure, drawn))


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
    looking = suffix.build(replace(setup, acceptance_probs=True), given[2] or "outputs=0")
    if looking.acceptance_model is None:
        raise UsageError(f"drafter='hybrid:{argument}'; allowed: arguments of suffix but p=PERCENT")
    stops = setup.controller is None and not setup.confidence and setup.device.type == "cpu"
    drafting = model.build(setup, STOP if stops else "")
    return HybridDrafter(looking, drafting, steps, setup.controller, drawn=not setup.coupled)
