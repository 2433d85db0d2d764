"""From settings to a loop: which models in which precision, which drafter, how many tokens, which rule."""

from __future__ import annotations

from typing import Any

from slipstream import drafters
from slipstream.config import DecoderConfig
from slipstream.core.acceptance import Rule, rule_for
from slipstream.core.interfaces import Drafter, Policy
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine
from slipstream.core.session import Session
from slipstream.core.types import Draft
from slipstream.draft_length.controller import LONGEST, DraftController
from slipstream.draft_length.cost_model import CostModel
from slipstream.draft_length.policies import Auto, Fixed, Heuristic
from slipstream.errors import UsageError
from slipstream.models.hf.vocabulary import check_same
from slipstream.models.loaded import Loaded, LoadOptions, is_loaded, is_toy
from slipstream.models.loading import load
from slipstream.reproducibility.calibration import Calibration

DEFAULT_DRAFT_TOKENS = {"none": 0, "model": 6, "layer_skip": 4}
DEFAULT_DRAFT_TOKENS |= dict.fromkeys(("ngram", "ngram_table", "suffix", "token_recycling", "retrieval", "hybrid"), 7)
OTHER_DRAFT_TOKENS = 5  # of drafters not listed
LOOK_UPS = (
    "ngram",
    "ngram_table",
    "suffix",
    "token_recycling",
    "retrieval",
)  # their drafts take no time and are never drawn
READERS = ("model", "hybrid")  # their draft model reads a text before it drafts
UNSURE = (*READERS, "layer_skip")  # they know a probability of each token


def load_options_of(config: DecoderConfig) -> LoadOptions:
    """How the target is loaded."""
    return LoadOptions(config.dtype, config.device, config.fast, config.load_options)


def load_draft(draft: Any, config: DecoderConfig, target: Loaded, tokenizer: Any = None) -> Loaded | None:
    """The draft model in its own precision, or None if there is none; its vocabulary must be the target's."""
    dtype = config.draft_dtype
    if dtype != "auto":
        allowed = None if draft is None or is_toy(draft) else ("int4", "int8") if is_loaded(draft) else (dtype,)
        if allowed is None or dtype not in allowed:
            what = "there is no draft model" if draft is None else "the draft model is loaded already"
            raise UsageError(f"draft_dtype={dtype!r}, but {what}; allowed: {', '.join(('auto', *(allowed or ())))}")
    if draft is None:
        return None
    loaded = load(draft, load_options_of(config).for_draft(dtype), tokenizer if is_loaded(draft) else None)
    check_same(target, loaded)
    return loaded


def assemble(
    config: DecoderConfig,
    drafter: str | Drafter,
    rule: Rule | None,
    target: Session,
    draft: Session | None,
    found: Calibration | None = None,
) -> tuple[str, Engine]:
    """The drafter's name, with "auto" resolved, and the engine.

    rule: one given as an object, instead of a name. found: the target's calibration, which knows what forwards take.
    """
    acceptance, device = rule or config.acceptance, target.backend.device
    coupled = acceptance != "auto" and rule_for(acceptance, Draft.empty(0, device)).coupled
    count = config.num_draft_tokens
    if drafter == "auto":
        drafter = "suffix" if draft is None else "hybrid" if count == "auto" else "model"
    name = name_of(drafter)
    kind = name.partition(":")[0]
    if _confidence(count) and (kind not in UNSURE or "p=" in name):
        raise UsageError(
            f"num_draft_tokens={count!r} with drafter={name!r}; allowed: drafters {', '.join(UNSURE)} without p=PERCENT"
        )
    controller = None
    if count == "auto" and name != "none":
        cost_model = CostModel(
            target.shapes.pad,
            target.num_tokens,
            {} if found is None else found.milliseconds,
            {} if found is None else found.totals,
            config.max_batch_size,
            timed=device.type == "cpu",
        )
        controller = DraftController(cost_model, longest=_longest(target), reads=kind in READERS)
    setup = drafters.Setup(
        device,
        target.backend.vocab_size,
        draft,
        coupled,
        controller,
        _confidence(count),
        acceptance_probs=controller is not None,
        target=target,
    )
    built = drafters.load(drafter, setup) if isinstance(drafter, str) else drafter
    if not isinstance(built, Drafter):
        raise UsageError(f"drafter={drafter!r}; allowed: a name or an object with propose(rows, lengths, sampler)")
    policy: Policy
    if controller is None:
        policy = _policy(count, _default(kind), target.longest_draft)
    else:
        drawn = not coupled and kind not in LOOK_UPS
        policy = Auto(controller, _default(kind), drawn, stepwise=kind not in (*LOOK_UPS, "hybrid"))
    return name, Engine(target, built, policy, acceptance, config.max_batch_size, draft)


def _longest(target: Session) -> int:
    return LONGEST if target.longest_draft is None else min(LONGEST, target.longest_draft)


def _confidence(count: int | str) -> float:
    name, _, argument = str(count).partition(":")
    return float(argument) if name == "confidence" else 0.0


def _policy(count: int | str, default: int, limit: int | None) -> Policy:
    most = MAX_DRAFT_TOKENS if limit is None else limit
    name, _, argument = str(count).partition(":")
    if name == "auto":
        return Fixed(default)
    if name == "confidence":
        return Fixed(most)
    length = int(argument or most) if name == "heuristic" else int(name)
    if length > most:
        why = "" if limit is None else " in reproducible mode, or reproducible=False"
        raise UsageError(f"num_draft_tokens={count}; allowed: at most {most}{why}")
    return Heuristic(length) if name == "heuristic" else Fixed(length)


def name_of(choice: object) -> str:
    """The name of a drafter or rule, whichever way it was given."""
    if isinstance(choice, Rule):
        return choice.name
    return choice if isinstance(choice, str) else type(choice).__name__


def _default(drafter: str) -> int:
    return DEFAULT_DRAFT_TOKENS.get(drafter, OTHER_DRAFT_TOKENS)
