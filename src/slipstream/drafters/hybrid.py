"""Two drafters in one: text that was seen before is retrieved, the rest is drafted by the draft model.

A retrieval draft costs nothing but its verification, a draft model's a forward per token. Retrieval knows how likely
its tokens are to be accepted, from how such tokens fared in this row, whether they were used or not; so a row that
leaves familiar ground is noticed at once, and so is one that comes back to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from slipstream.core.interfaces import Drafter, Extender, Learner, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.acceptance_model import DraftNote, joined
from slipstream.draft_length.planner import DraftController
from slipstream.drafters import Setup, model, suffix
from slipstream.errors import UsageError

STEPS = 6  # tokens the draft model drafts at most, where costs are not known
WORTH = 1.2  # tokens a retrieval draft must then be expected to add, or
SHARE = 0.6  # this share of what is asked for
STOP = "p=40"  # the draft model's argument then
LEAST = 0.2  # and then it ends where its acceptance is less likely than this


@dataclass
class HybridDrafter:
    """Takes `first`'s draft for a row or `second`'s, whichever promises more.

    Drafts of `first` must be one-hot and have acceptance probabilities. A round in which every row's draft is retrieved
    costs no forward of `second`; else it drafts for the whole batch at once. With `controller` costs decide, and may
    decide for neither; without it, or where sampled text depends on the draft, a retrieval draft is used if it can be
    expected to add WORTH tokens.
    steps: tokens of `second` at most. samples: whether `second` samples from a distribution of its own.
    """

    first: Drafter
    second: Drafter
    steps: int = STEPS
    controller: DraftController | None = None
    samples: bool = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the draft of one of the two."""
        found = self.first.propose(rows, lengths, sampler)
        if found.probs is not None or found.acceptance_probs is None:
            what = "samples its drafts" if found.probs is not None else "knows no acceptance probabilities"
            raise UsageError(f"hybrid: {type(self.first).__name__} {what}; allowed: a drafter that retrieves them")
        probs = [known or () for known in found.acceptance_probs]
        notes: Sequence[DraftNote] | None = None
        if self.controller is None or self._is_fixed(rows):
            found = replace(found.cut([sum(p >= LEAST for p in known) for known in probs]), acceptance_probs=None)
            wanted = [self._wanted(known, n) for known, n in zip(probs, lengths, strict=True)]
        else:
            decision = self.controller.prefer_model(rows, probs, lengths)
            wanted, notes = [min(n, self.steps) for n in decision.lengths], decision.notes
        if not any(wanted):
            return replace(found, notes=None if notes is None else tuple(notes))
        drafted = self.second.propose(rows, wanted, sampler)
        if notes is not None:
            own = drafted.notes or (None,) * len(rows)
            notes = [joined(note, one) for note, one in zip(notes, own, strict=True)]
        if isinstance(self.first, Extender) and drafted.acceptance_probs is not None and drafted.probs is None:
            drafted = _extended(self.first, rows, lengths, drafted)
        retrieved = [n == 0 for n in wanted]
        found = found.cut([n if own else 0 for own, n in zip(retrieved, found.lengths, strict=True)])
        return replace(merged(retrieved, found, drafted), notes=None if notes is None else tuple(notes))

    def forget(self) -> None:
        """Drop what either learned from requests."""
        for drafter in (self.first, self.second):
            if isinstance(drafter, Learner):
                drafter.forget()

    def _wanted(self, probs: Sequence[float], length: int) -> int:
        """Tokens to ask the draft model for where costs are not known; 0 to use the retrieval draft."""
        worth = length == 0 or sum(probs[:length]) >= min(WORTH, SHARE * length)
        return 0 if worth else min(length, self.steps)

    def _is_fixed(self, rows: Sequence[Row]) -> bool:
        """Whether drafts must depend on nothing but the rows, so that a seed gives the same text again."""
        return self.samples and any(row.params.temperature > 0 for row in rows)


def _extended(by: Extender, rows: Sequence[Row], lengths: Sequence[int], draft: Draft) -> Draft:
    """The draft with what retrieval finds after it. Its tokens are on the host already, or it had no probabilities."""
    assert draft.acceptance_probs is not None
    proposals, probs = [], []
    for row, most, tokens, length, known in zip(
        rows, lengths, draft.tokens.tolist(), draft.lengths, draft.acceptance_probs, strict=True
    ):
        more, more_probs = list[int](), list[float]()
        if known:
            more, more_probs = by.extend(row, tokens[:length], most - length, known[-1])
        proposals.append(tokens[:length] + more)
        probs.append(None if known is None else [*known, *more_probs])
    longer = Draft.from_lists(proposals, draft.tokens.device)
    return replace(longer, acceptance_probs=tuple(probs), steps=draft.steps, siblings=draft.siblings)


def merged(retrieved: Sequence[bool], found: Draft, drafted: Draft) -> Draft:
    """Rows of `found` that are `retrieved`, else of `drafted`."""
    width = max(found.width, drafted.width)
    first = torch.tensor(retrieved).to(found.tokens.device, non_blocking=True)
    tokens = torch.where(first[:, None], _widened(found.tokens, width), _widened(drafted.tokens, width))
    lengths = tuple(a if own else b for own, a, b in zip(retrieved, found.lengths, drafted.lengths, strict=True))
    nothing = [None] * len(retrieved)
    both = zip(retrieved, found.acceptance_probs or nothing, drafted.acceptance_probs or nothing, strict=True)
    merged = Draft(tokens, lengths, None, tuple(a if own else b for own, a, b in both), drafted.steps)
    if drafted.probs is None:
        beside = drafted.siblings or ((),) * len(retrieved)
        siblings = tuple(() if own else them for own, them in zip(retrieved, beside, strict=True))
        return replace(merged, siblings=siblings) if any(siblings) else merged
    sure = one_hot(tokens, drafted.probs.shape[-1]).to(drafted.probs.dtype)
    sampled = pad(drafted.probs, (0, 0, 0, width - drafted.width))
    return replace(merged, probs=torch.where(first[:, None, None], sure, sampled))


def _widened(tokens: Tensor, width: int) -> Tensor:
    return pad(tokens, (0, width - tokens.shape[1]))


TRAITS = Traits(
    plans_itself=True,
    has_own_cache=True,
    knows_confidence=True,
    branches=True,
    default_length=7,
    preference=3,
    needs_draft_model=True,
    needs_cost_model=True,
)


def build(setup: Setup, argument: str) -> HybridDrafter:
    """ "hybrid", "hybrid:STEPS" or "hybrid:STEPS+SUFFIX", where SUFFIX is an argument of the drafter `suffix`.

    Without one it retrieves from the row's own text only, so that a seed has one text under `block`, `rejection` too.
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
    chains = replace(
        setup, acceptance_probs=True, siblings=0, fixed_tree=False
    )  # the draft model's siblings stand beside
    retrieving = suffix.build(chains, given[2] or "outputs=0", f"hybrid:{given[1]}+")
    if retrieving.acceptance_model is None:
        raise UsageError(f"drafter='hybrid:{argument}'; allowed: arguments of suffix but p=PERCENT")
    stops = setup.controller is None and not (setup.confidence or setup.fixed_tree) and setup.device.type == "cpu"
    if setup.fixed_tree:
        steps = MAX_DRAFT_TOKENS
    drafting = model.build(setup, STOP if stops else "")
    return HybridDrafter(retrieving, drafting, steps, setup.controller, samples=not setup.coupled)
