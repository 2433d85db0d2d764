"""The target's own first layers, or a choice of them, with its final norm and its head: a draft model for nothing.

Skipping layers of the target to draft: Zhang et al. 2023, "Draft & Verify" (arXiv:2309.08168); leaving after the first
ones: Elhoushi et al. 2024, "LayerSkip" (arXiv:2404.16710). Weights and KV cache are the target's; see
`slipstream.drafters.layer_skip.shared_cache`.
"""

from __future__ import annotations

import re

from slipstream.core.traits import Traits
from slipstream.drafters import Setup
from slipstream.drafters.layer_skip.shared_cache import SharedCacheSession, default_layers, parse_layers
from slipstream.drafters.model import ModelDrafter, stop_for
from slipstream.errors import UsageError

ARGUMENT = re.compile(r"(?:(\d+|\d+-\d+|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)+)(?:\+p=(\d{1,2}))?|p=(\d{1,2}))?")


USAGE = "layer_skip[:LAYERS][+p=PERCENT]"
TRAITS = Traits(knows_probs=True, default_length=4)


def build(setup: Setup, argument: str) -> ModelDrafter:
    """ "layer_skip", "layer_skip:LAYERS" or "layer_skip:FIRST-LAST,..."; "+p=PERCENT" after them stops early.

    Without layers: those that `benchmarks/layer_search.py` saved for this model, else the first three quarters. When to
    stop is as with `model`.
    """
    given = ARGUMENT.fullmatch(argument)
    if given is None:
        raise UsageError(
            f"drafter='layer_skip:{argument}'; allowed: layer_skip, layer_skip:LAYERS (the first ones), "
            "a list like layer_skip:0-7,12, each with +p=PERCENT from 0 to 99, or layer_skip:p=PERCENT"
        )
    if setup.target is None:
        raise UsageError(
            "drafter='layer_skip' drafts with the target's layers; allowed: a setup with the target's session"
        )
    backend = setup.target.backend
    layers = default_layers(backend) if given[1] is None else parse_layers(given[1], backend)
    percent = given[2] or given[3]
    session = SharedCacheSession(setup.target, layers)
    return ModelDrafter(session, setup.vocab_size, setup.coupled, stop_for(setup, int(percent) if percent else None))
