"""The engine that takes the rounds of rows with predictions: the decoder's own, with predictions asked first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from slipstream.config import DecoderConfig
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine
from slipstream.draft_length.choice import LengthChoice
from slipstream.models.loaded import Loaded
from slipstream.predicted_outputs.prediction_drafter import PredictionLimits, PredictionPolicy, prediction_drafter
from slipstream.predicted_outputs.row_predictions import RowPredictions
from slipstream.wiring.model_pair import ModelPair


def why_no_predictions(models: ModelPair, config: DecoderConfig) -> str:
    """Why the decoder drafts for no request, so that predictions are refused, and what is allowed; else empty."""
    if LengthChoice.parse(config.num_draft_tokens) == LengthChoice("fixed", 0):
        return "a decoder of num_draft_tokens=0, which drafts nothing; allowed: num_draft_tokens='auto' or at least 1"
    if models.shapes.token_by_token or models.target_session.longest_draft == 0:
        return "a target that reads drafts token by token to be reproducible; allowed: reproducible=False"
    return ""


def predicting_engine(engine: Engine, target: Loaded, limits: PredictionLimits) -> Engine:
    """The engine with a drafter and a policy that ask the predictions of rows first."""
    predictions = RowPredictions(line_ends(target))
    policy = PredictionPolicy(engine.policy, predictions, limits)
    drafter = prediction_drafter(engine.drafter, predictions, free_drafts=limits.free_drafts)
    return replace(engine, drafter=drafter, policy=policy)


def longest_prediction(choice: LengthChoice, limit: int | None) -> int:
    """Tokens of a prediction in a round: no more than the user chose per round, if that was a number.

    limit: the longest draft that the forward shapes allow, None for any.
    """
    bound = choice.count if choice.kind in ("fixed", "heuristic") else None
    return min(n for n in (MAX_DRAFT_TOKENS, limit, bound) if n is not None)


def line_ends(target: Loaded) -> Callable[[int], bool]:
    """Whether a token ends a line; without a tokenizer none does."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return lambda token: False
    return cache(lambda token: "\n" in tokenizer.decode([token]))
