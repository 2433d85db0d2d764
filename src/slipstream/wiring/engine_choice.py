"""From a decoder's settings to its engine: which drafter, how much it drafts and by which rule drafts are accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from slipstream import drafters
from slipstream.config import DecoderConfig
from slipstream.constraints.forced_drafts import ForcedDrafts
from slipstream.core.acceptance import Rule, load_rule, rule_for
from slipstream.core.interfaces import Drafter
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine
from slipstream.core.types import Draft, Traits
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import LONGEST, STEPS, Planner
from slipstream.draft_length.policies import drafts_for, make_policy
from slipstream.errors import UsageError
from slipstream.models.cpu.compiled_race import race
from slipstream.models.loaded import Loaded
from slipstream.predicted_outputs.predicted_drafts import PredictedDrafts, RowPredictions
from slipstream.sampling.sampler import Sampler
from slipstream.wiring.draft_check import check_draft, users_draft
from slipstream.wiring.guarded_engine import GuardedEngine
from slipstream.wiring.model_pair import NOT_TIMED, ModelPair

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class EngineChoice:
    """The engine of some settings, with "auto" resolved. name, traits: the drafter's.

    coupled: whether every committed token is the target's own draw, so that a seed has one text whatever is drafted.
    no_predictions: why requests cannot have predictions, and what is allowed; empty if they can.
    """

    engine: Engine
    name: str
    traits: Traits
    coupled: bool
    no_predictions: str = ""


def check_names(config: DecoderConfig, drafter: str | Drafter) -> None:
    """Raise `UsageError` for unknown names; warn about a setting without effect."""
    if (useless := config.contradiction()) is not None:
        log.warning(useless)
    if config.acceptance != "auto":
        load_rule(config.acceptance)
    if isinstance(drafter, str):
        drafters.check_name(drafter)


def choose_engine(
    models: ModelPair, config: DecoderConfig, requested: str | Drafter, rule: Rule | None
) -> EngineChoice:
    """The engine of these settings. requested: the drafter; rule: an acceptance rule given as an object."""
    lengths = LengthChoice.parse(config.num_draft_tokens)
    parts = EngineParts(models, config, lengths, pick_drafter(models, lengths, requested), rule or config.acceptance)
    check_confidence(lengths, config.num_draft_tokens, parts.name)
    return EngineChoice(parts.engine(), parts.name, parts.traits, parts.coupled, why_no_predictions(models, lengths))


def pick_drafter(models: ModelPair, lengths: LengthChoice, requested: str | Drafter) -> str | Drafter:
    """The drafter that "auto" stands for; any other as it is."""
    if not isinstance(requested, str) or requested != "auto":
        return requested
    costs = lengths.kind == "auto"  # measured costs decide how much to draft
    if costs and models.shapes.token_by_token:  # a draft takes as many forwards as it has tokens
        return "none"
    return drafters.preferred(draft_model=models.draft_session is not None, costs=costs)


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. picked: the drafter, with "auto" resolved; acceptance: a rule or its name."""

    models: ModelPair
    config: DecoderConfig
    lengths: LengthChoice
    picked: str | Drafter
    acceptance: str | Rule

    @property
    def name(self) -> str:
        return name_of(self.picked)

    @property
    def traits(self) -> Traits:
        """What the drafter declares about itself."""
        return drafters.traits_of(self.picked)

    @property
    def is_built_in(self) -> bool:
        """Whether the drafter was given by name, not as an object of the user's."""
        return isinstance(self.picked, str)

    @property
    def coupled(self) -> bool:
        """Whether every committed token is the target's own draw."""
        if self.acceptance == "auto":  # our drafters are verified by `match`, a user's that samples by its own q
            return self.is_built_in or not self.traits.samples
        return rule_for(self.acceptance, Draft.empty(0, torch.device("cpu"))).coupled

    def engine(self) -> GuardedEngine:
        """The engine: drafter, policy and rule, and what edits drafts: predictions, constraints, checks."""
        target, traits = self.models.target_session, self.traits
        planner = self._planner() if self.lengths.kind == "auto" else None
        policy, drafter = make_policy(self.lengths, planner, limit=target.longest_draft), self._drafter(planner)
        engine = GuardedEngine(
            target,
            drafter,
            policy,
            Sampler,
            self.acceptance,
            self.models.draft_reader,
            make_race=race,
            check_draft=check_draft,
            sessions=[session for session in (target, self.models.draft_session) if session is not None],
        )
        if traits.default_length and self.lengths.count != 0:  # plain decoding drafts nothing, forced or not
            engine.constrain = ForcedDrafts(target)
        if not self.is_built_in:
            engine.constrain = partial(users_draft, self.name, engine.constrain, target.backend.vocab_size)
        if traits.has_own_cache:
            engine.drafts_for = partial(drafts_for, policy)
        if not why_no_predictions(self.models, self.lengths):
            engine.predict = PredictedDrafts(
                RowPredictions(line_ends(self.models.target)),
                longest_prediction(self.lengths, target.shapes.widths[-1] - 1 if target.shapes.widths else None),
                free_drafts=not traits.needs_forwards,
                costs_decide=lambda row: planner is not None and not planner.is_fixed(row),
            )
        return engine

    def _planner(self) -> Planner:
        """The planner of these models, with the costs that their calibration has measured."""
        models, traits, coupled = self.models, self.traits, self.coupled
        target, calibration = models.target_session, models.calibration
        times = models.draft_times if traits.needs_draft_model else NOT_TIMED
        costs = CostModel(
            pad=target.shapes.width_for,
            ragged=target.num_tokens,
            measured={} if calibration is None else calibration.milliseconds,
            together={} if calibration is None else calibration.totals,
            max_batch_size=self.config.max_batch_size,
            steps=times.steps,
            token=times.token,
            timed=target.backend.device.type == "cpu",
        )
        planner = Planner(
            costs,
            room=2 * STEPS if traits.branches else STEPS,
            longest=LONGEST if target.longest_draft is None else min(LONGEST, target.longest_draft),
            has_model=traits.needs_forwards,
            asks_model=traits.needs_forwards and not traits.needs_cost_model,
            reads=traits.has_own_cache,
            is_plain=self.name == "none",
            fixed_length=traits.default_length,
            is_fixed=lambda row: traits.samples and not coupled and row.params.temperature > 0,
        )
        if models.draft_reader is not None:
            planner.has_cached = models.draft_reader.holds
        if models.windowed is not None:
            planner.to_read = models.windowed.num_to_read
        return planner

    def _drafter(self, planner: Planner | None) -> Drafter:
        """The drafter of this name; an object is used as it is."""
        models, lengths, target = self.models, self.lengths, self.models.target_session
        refused = self._why_no_tree() if lengths.siblings else ""
        if refused and lengths.siblings > 0:
            raise UsageError(f"num_draft_tokens={self.config.num_draft_tokens!r} with {refused}")
        if not isinstance(self.picked, str):
            if not isinstance(self.picked, Drafter):
                raise UsageError(
                    f"drafter={self.picked!r}; allowed: a name or an object with propose(rows, lengths, sampler)"
                )
            return self.picked
        setup = drafters.Setup(
            device=target.backend.device,
            vocab_size=target.backend.vocab_size,
            session=models.draft_scorer(),
            coupled=self.coupled,
            planner=planner,
            confidence=lengths.confidence,
            acceptance_probs=planner is not None,
            target=target,
            bridged=models.bridged,
            siblings=0 if refused else abs(lengths.siblings),  # -1, as many as pay: one beside each token
            fixed_tree=lengths.siblings > 0,
            depth=(lengths.count or 0) // (1 + lengths.siblings) if lengths.siblings > 0 else 0,
            steps=MAX_DRAFT_TOKENS if planner is None else STEPS,
        )
        return drafters.load(self.picked, setup)

    def _why_no_tree(self) -> str:
        """Why drafts cannot branch, and what is allowed; empty if they can."""
        if not self.traits.branches:
            able = ", ".join(name for name in drafters.names() if drafters.traits(name).branches)
            return f"drafter={self.name!r}; allowed: trees with drafters {able}"
        if self.acceptance != "auto" and not self.coupled:
            return f"acceptance={name_of(self.acceptance)!r}; allowed: trees with acceptance 'match' or 'auto'"
        if self.models.bridged is not None and self.traits.needs_draft_model:
            return "a draft model of another vocabulary; allowed: a number of tokens, or 'auto'"
        if not self.models.target_session.branches:
            return "a target whose forwards take no trees; allowed: a number of tokens, or 'auto'"
        return ""


def why_no_predictions(models: ModelPair, lengths: LengthChoice) -> str:
    """Why predictions are refused, as the decoder never drafts, and what is allowed; empty if it does."""
    if lengths == LengthChoice("fixed", 0):
        return "a decoder of num_draft_tokens=0, which drafts nothing; allowed: num_draft_tokens='auto' or at least 1"
    if models.shapes.token_by_token or models.target_session.longest_draft == 0:
        return "a target that reads drafts token by token to be reproducible; allowed: reproducible=False"
    return ""


def longest_prediction(lengths: LengthChoice, limit: int | None) -> int:
    """Most tokens of a prediction in a round: no more than the user chose per round, if that was a number.

    limit: the longest draft that the forward shapes allow; None if there is no limit.
    """
    bound = lengths.count if lengths.kind in ("fixed", "heuristic") else None
    return min(n for n in (MAX_DRAFT_TOKENS, limit, bound) if n is not None)


def line_ends(target: Loaded) -> Callable[[int], bool]:
    """Whether a token ends a line; without a tokenizer none does."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return lambda token: False
    return cache(lambda token: "\n" in tokenizer.decode([token]))


def name_of(choice: object) -> str:
    """The name of a drafter or rule that was given by name or as an object."""
    if isinstance(choice, Rule):
        return choice.name
    return choice if isinstance(choice, str) else type(choice).__name__


def check_confidence(lengths: LengthChoice, spelled: object, drafter: str) -> None:
    """Refuse "confidence:CHANCE" with a drafter that has no draft model to be confident, or a threshold of its own."""
    able = [name for name in sorted(drafters.names()) if drafters.traits(name).needs_forwards]
    if lengths.confidence and (drafter.partition(":")[0] not in able or "p=" in drafter):
        raise UsageError(
            f"num_draft_tokens={spelled!r} with drafter={drafter!r}; allowed: drafters {', '.join(able)} "
            "without p=PERCENT"
        )
