"""Two sources: text that was seen before is retrieved, the rest is drafted by the draft model.

A retrieval draft costs only its verification, a draft model's a forward pass per token. So retrieval is asked first,
and the policy asks the draft model for those rows for which it promises more (`Policy.lengths`). Retrieval learns how
likely its tokens are to be accepted from all it proposes, whether it is used or not. It soon notices when a row leaves
familiar text, and when it comes back.
"""

from __future__ import annotations

import re
from dataclasses import replace

from slipstream.core.interfaces import Source
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Traits
from slipstream.drafters import Setup, model, suffix
from slipstream.errors import UsageError

STEPS = 6  # most tokens of the draft model in a round, unless the user says how many
TRAITS = Traits(
    has_own_cache=True,
    branches=True,
    default_length=7,
    preference=3,
    needs_draft_model=True,
    needs_cost_model=True,
)


def build(setup: Setup, argument: str) -> list[Source]:
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
    return [Source(retrieval, takes_forwards=False), Source(draft_model)]
