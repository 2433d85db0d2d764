"""From a decoder's settings to its engine: which drafter, how much it drafts and by which rule drafts are accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slipstream import drafters
from slipstream.config import DecoderConfig
from slipstream.constraints.forced_drafts import ForcedDrafts
from slipstream.core.acceptance import Rule, load_rule, rule_for
from slipstream.core.interfaces import Drafter
from slipstream.core.loop import Engine, Propose
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import LONGEST, DraftController
from slipstream.draft_length.policies import check_confidence, drafts_for, make_policy
from slipstream.errors import UsageError
from slipstream.predicted_outputs.prediction_drafter import PredictionLimits
from slipstream.reproducibility.timing import DraftTimes
from slipstream.sampling.sampler import Sampler
from slipstream.wiring.guarded_engine import GuardedEngine
from slipstream.wiring.model_pair import NOT_TIMED, ModelPair
from slipstream.wiring.predicting_engine import (
    longest_prediction,
    predicting_engine,
    why_no_predictions,
)

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class EngineChoice:
    """What settings come to, with "auto" resolved. name, traits: the drafter's.

    coupled: every committed token is the target's own draw, so that a seed has one text, whatever is drafted.
    no_predictions: why requests cannot have predictions, and what is allowed; empty if they can.
    """

    engine: Engine
    name: str
    traits: Traits
    coupled: bool
    no_predictions: str = ""


def check_names(config: DecoderConfig, drafter: str | Drafter) -> None:
    """Raise `UsageError` for names that are not known; warn of a setting without effect."""
    if (useless := config.contradiction()) is not None:
        log.warning(useless)
    if config.acceptance != "auto":
        load_rule(config.acceptance)
    if isinstance(drafter, str):
        drafters.check_name(drafter)


def choose_engine(models: ModelPair, config: DecoderConfig, wanted: str | Drafter, rule: Rule | None) -> EngineChoice:
    """The loop of these settings. wanted: the drafter; rule: an acceptance rule given as an object."""
    target, choice = models.target_session, LengthChoice.parse(config.num_draft_tokens)
    if wanted == "auto":
        costs = choice.kind == "auto"  # how much to draft goes by what it costs and brings
        wanted = drafters.preferred(draft_model=models.draft_session is not None, costs=costs)
        if costs and models.shapes.token_by_token:  # a draft takes as many forwards as it has tokens
            wanted = "none"
    name, traits = name_of(wanted), drafters.traits_of(wanted)
    check_confidence(choice, config.num_draft_tokens, name, traits)
    acceptance, device = rule or config.acceptance, target.backend.device
    built_here = isinstance(wanted, str)  # and then told to leave every draw to the target, where that is chosen
    if acceptance == "auto":
        coupled = built_here or not traits.samples
    else:
        coupled = rule_for(acceptance, Draft.empty(0, device)).coupled
    controller = None
    if choice.kind == "auto" and name != "none":
        controller = make_controller(models, config.max_batch_size, traits)
    refused = choice.siblings and no_tree(name, traits, models, acceptance, coupled=coupled)
    if refused and choice.siblings > 0:
        raise UsageError(f"num_draft_tokens={config.num_draft_tokens!r} with {refused}")
    setup = drafters.Setup(
        device,
        target.backend.vocab_size,
        models.draft_scorer(),
        coupled,
        controller,
        choice.confidence,
        acceptance_probs=controller is not None,
        target=target,
        bridged=models.bridged,
        siblings=0 if refused else max(0, choice.siblings) or int(choice.siblings < 0),
        fixed_tree=choice.siblings > 0,
        depth=(choice.count or 0) // (1 + choice.siblings) if choice.siblings > 0 else 0,
    )
    drafter = drafters.load(wanted, setup) if isinstance(wanted, str) else wanted
    if not isinstance(drafter, Drafter):
        raise UsageError(f"drafter={wanted!r}; allowed: a name or an object with propose(rows, lengths, sampler)")
    policy = make_policy(choice, traits, controller, coupled=coupled, limit=target.longest_draft)
    engine = Engine(target, drafter, policy, Sampler, acceptance, models.draft_reader)
    if traits.default_length and choice.count != 0:  # plain decoding drafts nothing, forced or not
        engine.constrain = ForcedDrafts(target)
    if not built_here:
        engine.constrain = partial(_in_vocabulary, engine.constrain, target.backend.vocab_size)
    if traits.has_own_cache:
        engine.drafts_for = partial(drafts_for, policy)
    no_predictions = why_no_predictions(models, config)
    if not no_predictions:
        own = make_cost_model(models, config.max_batch_size) if choice.kind == "auto" else None
        limits = PredictionLimits(
            cost_model=own if controller is None else controller.cost_model,
            shares_costs=controller is not None,
            is_fixed=lambda row: not coupled and row.params.temperature > 0,
            longest=longest_prediction(choice, target.shapes.widths[-1] - 1 if target.shapes.widths else None),
            free_drafts=not (traits.needs_forwards or traits.plans_itself),
        )
        engine.predicting = predicting_engine(engine, models.target, limits)
    guarded = GuardedEngine.of(engine, target, models.draft_session)
    return EngineChoice(guarded, name, traits, coupled, no_predictions)


def _in_vocabulary(
    constrain: Callable[[Sequence[Row], Propose], Draft], vocab_size: int, rows: Sequence[Row], propose: Propose
) -> Draft:
    """A draft whose ids are all the target's: others, such as -1 for "none", become the nearest, and are drafts too."""
    draft = constrain(rows, propose)
    return replace(draft, tokens=draft.tokens.clamp(0, vocab_size - 1))


def make_controller(models: ModelPair, max_batch_size: int, traits: Traits) -> DraftController:
    """What decides how much to draft, with the costs that calibration has measured."""
    times = models.draft_times if traits.needs_draft_model else NOT_TIMED
    target, cost_model = models.target_session, make_cost_model(models, max_batch_size, times)
    longest = LONGEST if target.longest_draft is None else min(LONGEST, target.longest_draft)
    controller = DraftController(cost_model, longest=longest, reads=traits.has_own_cache)
    if models.draft_reader is not None:
        controller.has_cached = models.draft_reader.holds
    if models.windowed is not None and models.bridged is None:
        controller.to_read = models.windowed.num_to_read
    return controller


def make_cost_model(models: ModelPair, max_batch_size: int, times: DraftTimes = NOT_TIMED) -> CostModel:
    """What forwards cost, beginning with what was measured. times: of the draft model, where it drafts."""
    target, found = models.target_session, models.calibration
    return CostModel(
        target.shapes.width_for,
        target.num_tokens,
        {} if found is None else found.milliseconds,
        {} if found is None else found.totals,
        max_batch_size,
        times.steps,
        times.token,
        timed=target.backend.device.type == "cpu",
    )


def name_of(choice: object) -> str:
    """The name of a drafter or rule, whichever way it was given."""
    if isinstance(choice, Rule):
        return choice.name
    return choice if isinstance(choice, str) else type(choice).__name__


def no_tree(drafter: str, traits: Traits, models: ModelPair, acceptance: str | Rule, *, coupled: bool) -> str:
    """Why drafts cannot branch, and what is allowed; empty if they can."""
    if not traits.branches:
        able = ", ".join(name for name in drafters.names() if drafters.traits(name).branches)
        return f"drafter={drafter!r}; allowed: trees with drafters {able}"
    if acceptance != "auto" and not coupled:
        return f"acceptance={name_of(acceptance)!r}; allowed: trees with acceptance 'match' or 'auto'"
    if models.bridged is not None and traits.needs_draft_model:
        return "a draft model of another vocabulary; allowed: a number of tokens, or 'auto'"
    if not models.target_session.branches:
        return "a target whose forwards take no trees; allowed: a number of tokens, or 'auto'"
    return ""
