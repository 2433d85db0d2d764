"""From a decoder's settings to its engine: which drafter, how much it drafts and by which rule drafts are accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from slipstream import drafters
from slipstream.config import DecoderConfig
from slipstream.constraints.forced_drafts import ForcedDrafts
from slipstream.core.acceptance import Rule, load_rule, rule_for
from slipstream.core.interfaces import Drafter, Source
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine
from slipstream.core.rng import Race
from slipstream.core.types import Draft, Traits
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import LONGEST, STEPS, Planner
from slipstream.draft_length.policies import make_policy
from slipstream.drafters._predictions import PredictionDrafter
from slipstream.errors import UsageError
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.cpu.compiled_race import race
from slipstream.sampling.sampler import Sampler
from slipstream.wiring.draft_check import checked
from slipstream.wiring.model_pair import NOT_TIMED, ModelPair

log = logging.getLogger("slipstream")


def check_names(config: DecoderConfig, drafter: str | Drafter, rule: Rule | None) -> None:
    """Raise `UsageError` for unknown names; warn about a setting without effect."""
    if (useless := config.contradiction()) is not None:
        log.warning(useless)
    if rule is None and config.acceptance != "auto":
        load_rule(config.acceptance)
    if isinstance(drafter, str):
        drafters.check_name(drafter)


def choose_engine(
    models: ModelPair, config: DecoderConfig, requested: str | Drafter, rule: Rule | None
) -> EngineChoice:
    """The parts of an engine with these settings. requested: the drafter; rule: an acceptance rule, if an object."""
    lengths = LengthChoice.parse(config.num_draft_tokens)
    choice = EngineChoice(models, config, lengths, pick_drafter(models, lengths, requested), rule or config.acceptance)
    check_confidence(lengths, config.num_draft_tokens, choice.name)
    return choice


def pick_drafter(models: ModelPair, lengths: LengthChoice, requested: str | Drafter) -> str | Drafter:
    """The drafter that "auto" or `module:Name` stands for; any other as it is."""
    if not isinstance(requested, str):
        return requested
    if drafters.is_of_user(requested):
        target = models.target_session
        setup = drafters.Setup(target.backend.device, target.backend.vocab_size, target=target)
        return drafters.users_drafter(requested, setup)
    if requested != "auto":
        return requested
    costs = lengths.kind == "auto"  # measured costs decide how much to draft
    if costs and models.shapes.token_by_token:  # a draft takes as many forwards as it has tokens
        return "none"
    return drafters.preferred(draft_model=models.draft_session is not None, costs=costs)


@dataclass(frozen=True)
class EngineChoice:
    """The parts of an engine, with "auto" resolved."""

    models: ModelPair
    config: DecoderConfig
    lengths: LengthChoice
    drafter: str | Drafter
    acceptance: str | Rule

    @property
    def name(self) -> str:
        return self.config.drafter if drafters.is_of_user(self.config.drafter) else name_of(self.drafter)

    @property
    def traits(self) -> Traits:
        return drafters.traits_of(self.drafter)

    @property
    def no_predictions(self) -> str:
        """The reason why requests cannot have predictions, and what is allowed; empty if they can."""
        if self.lengths == LengthChoice("fixed", 0):
            return (
                "a decoder of num_draft_tokens=0, which drafts nothing; allowed: num_draft_tokens='auto' or at least 1"
            )
        if self.models.shapes.token_by_token or self.models.target_session.longest_draft == 0:
            return "a target that reads drafts token by token to be reproducible; allowed: reproducible=False"
        return ""

    @property
    def coupled(self) -> bool:
        """True if every committed token is the target's own draw, so that a seed has one text whatever is drafted."""
        if self.acceptance == "auto":  # our drafters are verified by `match`, a user's that samples by its own q
            return isinstance(self.drafter, str) or not self.traits.samples
        return rule_for(self.acceptance, Draft.empty(0, torch.device("cpu"))).coupled

    def engine(self) -> Engine:
        """The engine: sources, policy and rule, and the grammar of constraints."""
        models, traits, target = self.models, self.traits, self.models.target_session
        planner = self._planner() if self.lengths.kind == "auto" else None
        return Engine(
            target,
            self._sources(planner),
            make_policy(self.lengths, planner, limit=target.longest_draft),
            Sampler,
            self.acceptance,
            models.draft_reader if traits.has_own_cache or not isinstance(self.drafter, str) else None,
            traits.has_own_cache,
            # plain decoding drafts nothing, forced or not
            ForcedDrafts(target) if traits.default_length and self.lengths.count != 0 else None,
            self._race(),
        )

    def _race(self) -> Callable[[int, torch.device], Race]:
        """Makes the source of random draws."""
        target = self.models.target
        if target.backend.device.type == "cuda" and self.config.fast is not False:
            from slipstream.models.cuda.captured_race import CapturedRace

            return CapturedRace
        return partial(race, in_blocks=target.model is not None and bool(block_linears(target.model)))

    def _planner(self) -> Planner:
        """The planner of these models, with the costs that their calibration has measured."""
        models, traits, coupled = self.models, self.traits, self.coupled
        target, reader, windowed = models.target_session, models.draft_reader, models.windowed
        times = models.draft_times if traits.needs_draft_model else NOT_TIMED
        return Planner(
            CostModel.calibrated(target, models.calibration, times, self.config.max_batch_size),
            # an own cache and costs: the draft model of "hybrid", whose drafts retrieval continues
            room=LONGEST if traits.needs_cost_model else 2 * STEPS if traits.branches else STEPS,
            longest=LONGEST if target.longest_draft is None else min(LONGEST, target.longest_draft),
            has_model=traits.needs_forwards,
            only_model=traits.needs_forwards and not traits.needs_cost_model,
            reads=traits.has_own_cache,
            is_plain=self.name == "none",
            fixed_length=traits.default_length,
            is_fixed=lambda row: traits.samples and not coupled and row.params.temperature > 0,
            has_cached=lambda row: reader is not None and reader.holds(row),
            to_read=lambda row: len(row.tokens) if windowed is None else windowed.num_to_read(row),
        )

    def _sources(self, planner: Planner | None) -> list[Source]:
        """The sources of drafts: predictions, if requests can have any, and those of the drafter."""
        models, lengths, target = self.models, self.lengths, self.models.target_session
        refused = self._why_no_tree() if lengths.siblings else ""
        if refused and lengths.siblings > 0:
            raise UsageError(f"num_draft_tokens={self.config.num_draft_tokens!r} with {refused}")
        reader = PredictionDrafter(costs_decide=planner is not None)
        predictions = [] if self.no_predictions else [Source(reader, takes_forwards=False, of_predictions=True)]
        if not isinstance(self.drafter, str):
            if not isinstance(self.drafter, Drafter):
                raise UsageError(
                    f"drafter={self.drafter!r}; allowed: a name or an object with propose(rows, lengths, sampler)"
                )
            user = checked(self.drafter, target.backend)
            return [*predictions, Source(user, self.traits.needs_forwards)]
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
            siblings=0 if refused else abs(lengths.siblings),  # -1, as many as pay: one next to each token
            fixed_tree=lengths.siblings > 0,
            depth=(lengths.count or 0) // (1 + lengths.siblings) if lengths.siblings > 0 else 0,
            steps=MAX_DRAFT_TOKENS if planner is None else STEPS,
        )
        return [*predictions, *drafters.sources(self.drafter, setup)]

    def _why_no_tree(self) -> str:
        """Reason why drafts cannot branch, and what is allowed; empty if they can."""
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
