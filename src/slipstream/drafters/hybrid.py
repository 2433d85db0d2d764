"""Two drafters in one: text that was seen before is retrieved, the rest is drafted by the draft model.

A retrieval draft costs only its verification, a draft model's a forward per token. Retrieval learns how likely its
tokens are to be accepted from all it proposes, whether it is used or not. So it soon notices when a row leaves familiar
text, and when it comes back.
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

STEPS = 6  # most tokens of the draft model in a round, unless the user says how many


@dataclass
class HybridDrafter:
    """For each row, takes the draft of `first` (retrieval) or of `second` (a draft model), whichever promises more.

    Drafts of `first` must be one-hot and have acceptance probabilities. A round in which every row's draft is retrieved
    costs no forward of `second`; else it drafts for the whole batch at once. With `planner`, costs decide, possibly for
    neither. Without it, or where sampled text depends on the draft, a retrieval draft is used if it is long enough.
    samples: whether `second` samples from a distribution of its own.
    """

    first: Drafter
    second: Drafter
    planner: Planner | None = None
    samples: bool = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        if not any(lengths):
            return Draft.empty(len(rows), sampler.device)
        retrieved = self.first.propose(rows, lengths, sampler)
        if retrieved.probs is not None or None in retrieved.acceptance_probs:
            what = "samples its drafts" if retrieved.probs is not None else "reports no acceptance probabilities"
            allowed = "allowed: a drafter of one-hot drafts with acceptance probabilities"
            raise UsageError(f"hybrid: {type(self.first).__name__} {what}; {allowed}")
        probs = [row_probs or () for row_probs in retrieved.acceptance_probs]
        if self.planner is None or self._is_fixed(rows):
            retrieved = retrieved.cut([sum(prob >= 0.2 for prob in row_probs) for row_probs in probs])
            retrieved = replace(retrieved, rows=())  # so that it is not cut again
            model_lengths = [self._model_length(row_probs, n) for row_probs, n in zip(probs, lengths, strict=True)]
        else:
            model_lengths = self.planner.model_lengths(rows, probs, lengths)
        if not any(model_lengths):
            return retrieved
        drafted = self.second.propose(rows, model_lengths, sampler)
        return Draft.where([n == 0 for n in model_lengths], retrieved, drafted)

    def forget(self) -> None:
        for drafter in (self.first, self.second):
            if isinstance(drafter, Learner):
                drafter.forget()

    def _model_length(self, probs: Sequence[float], length: int) -> int:
        """Tokens to ask the draft model for where costs are not known."""
        # retrieval must be expected to add 1.2 tokens, or 60 % of a short draft
        return 0 if sum(probs[:length]) >= min(1.2, 0.6 * length) else length

    def _is_fixed(self, rows: Sequence[Row]) -> bool:
        """Whether drafts must depend on the rows alone, so that a seed gives the same text again."""
        return self.samples and any(row.params.temperature > 0 for row in rows)


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

    Without one it retrieves from the row's own text only, so that a seed has one text under `block` and `rejection`.
    """
    match = re.fullmatch(r"(\d*)(?:\+(.+))?", argument)
    steps = STEPS if match is None or not match[1] else int(match[1])
    if match is None or steps < 1:
        raise UsageError(
            f"drafter='hybrid:{argument}'; allowed: hybrid, hybrid:STEPS with at least 1 token of the draft model, and "
            "+ an argument of the drafter suffix"
        )
    if setup.session is None:
        raise UsageError("drafter='hybrid' needs a draft model; give draft=... (command line: --draft)")
    # siblings are for the draft model: retrieval drafts stay chains
    chains = replace(setup, acceptance_probs=True, siblings=0, fixed_tree=False)
    retrieval = suffix.build(chains, match[2] or "outputs=0", f"hybrid:{match[1]}+")
    if retrieval.acceptance_model is None:
        raise UsageError(f"drafter='hybrid:{argument}'; allowed: arguments of suffix other than p=PERCENT")
    # without costs, low probability ends drafts; on a GPU waiting for probabilities costs more than it saves
    stops = setup.planner is None and not (setup.confidence or setup.fixed_tree) and setup.device.type == "cpu"
    steps = MAX_DRAFT_TOKENS if setup.fixed_tree else steps
    draft_model = model.build(replace(setup, steps=steps, extender=retrieval), "p=40" if stops else "")
    return HybridDrafter(retrieval, draft_model, setup.planner, samples=not setup.coupled)
