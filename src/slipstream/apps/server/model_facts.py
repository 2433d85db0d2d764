"""What is told of the models in every answer: their name, and a fingerprint of all that texts depend on."""

from __future__ import annotations

import copy
from functools import partial

from slipstream.apps.server.answer_parts import ModelFacts
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.acceptance_model import DraftNote
from slipstream.wiring.model_fingerprint import fingerprint_of


def facts_of(decoder: SpeculativeDecoder, name: str) -> ModelFacts:
    """The facts of a decoder. name: by which it is served, "" for the target's own."""
    return ModelFacts(
        name or decoder.target.name,
        fingerprint_of(decoder),
        decoder.reproducible and decoder.coupled,
        partial(source_of, decoder.drafter_name, decoder.traits.weighs_costs),
        decoder.lossless,
        copy.deepcopy(decoder.tokenizer),
    )


def source_of(drafter: str, mixed: bool, done: Round) -> str:
    """The decoder's drafter in a round. mixed: it takes turns with a draft model."""
    if mixed:
        drafted = isinstance(done.note, DraftNote) and done.note.asked > 0
        return "model" if drafted else "retrieval"
    return drafter.partition(":")[0]
