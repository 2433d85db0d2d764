"""Two drafters in one: text that was seen before is retrieved, the rest is drafted by the draft model.

A retrieval draft costs nothing but its verification, a draft model's a forward per token. Retrieval knows how likely
its tokens are to be accepted, from how such tokens fared in this row, whether they were used or not; so a row that
leaves familiar ground is noticed at once, and so is one that comes back to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.core.interfaces import Drafter, Learner, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.planner import Planner
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
    costs no forward of `second`; else it drafts for the whole batch at once. With `planner` costs decide, and may
    decide for neither; without it, or where sampled text depends on the draft, a retrieval draft is used if it can be
    expected to add WORTH tokens.
    samples: whether `second` samples from a distribution of its own.
    """

    first: Drafter
    second: Drafter
    planner: Planner | None = None
    samples: bool = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the draft of one of the two."""
        retrieved = self.first.propose(rows, lengths, sampler)
        if retrieved.probs is not None or None in retrieved.acceptance_probs:
            what = "samples its drafts" if retrieved.probs is not None else "knows no acceptance probabilities"
            raise UsageError(f"hybrid: {type(self.first).__name__} {what}; allowed: a drafter that retrieves them")
        probs = [known or () for known in retrieved.acceptance_probs]
        if self.planner is None or self._is_fixed(rows):
            retrieved = retrieved.cut([sum(p >= LEAST for p in known) for known in probs])
            retrieved = replace(retrieved, rows=())  # they are not cut again
            wanted = [self._wanted(known, n) for known, n in zip(probs, lengths, strict=True)]
        else:
            wanted = self.planner.model_lengths(rows, probs, lengths)
        if not any(wanted):
            return retrieved
        drafted = self.second.propose(rows, wanted, sampler)
        return Draft.where([n == 0 for n in wanted], retrieved, drafted)

    def forget(self) -> None:
        """Drop what either learned from requests."""
        for drafter in (self.first, self.second):
            if isinstance(drafter, Learner):
                drafter.forget()

    def _wanted(self, probs: Sequence[float], length: int) -> int:
        """Tokens to ask the draft model for where costs are not known; 0 to use the retrieval draft."""
        return 0 if sum(probs[:length]) >= min(WORTH, SHARE * length) else length

    def _is_fixed(self, rows: Sequence[Row]) -> bool:
        """Whether drafts must depend on nothing but the rows, so that a seed gives the same text again."""
        return self.samples and any(row.params.temperature > 0 for row in rows)


USAGE = "hybrid[:STEPS][+SUFFIX]"
TRAITS = Traits(
    has_own_cache=True,
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
    stops = setup.planner is None and not (setup.confidence or setup.fixed_tree) and setup.device.type == "cpu"
    steps = MAX_DRAFT_TOKENS if setup.fixed_tree else steps
    drafting = model.build(replace(setup, steps=steps, extender=retrieving), STOP if stops else "")
    return HybridDrafter(retrieving, drafting, setup.planner, samples=not setup.coupled)
