"""From settings to a loop: which models in which precision, which drafter, how many tokens, which rule."""

from __future__ import annotations

from typing import Any

from slipstream import drafters
from slipstream.acceptance import Rule, rule_for
from slipstream.backends import Loaded, LoadOptions, is_loaded, is_toy, load
from slipstream.config import DecoderConfig
from slipstream.drafters import Drafter
from slipstream.engine import Engine
from slipstream.policy import Fixed
from slipstream.session import Session
from slipstream.types import Draft, UsageError
from slipstream.vocabulary import check_same

DEFAULT_DRAFT_TOKENS = {"ngram": 7, "table": 7, "suffix": 7, "hybrid": 7, "model": 6, "none": 0}
OTHER_DRAFT_TOKENS = 5  # of drafters not listed


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
    config: DecoderConfig, drafter: str | Drafter, rule: Rule | None, target: Session, draft: Session | None
) -> tuple[str, Engine]:
    """The drafter's name, with "auto" resolved, and the engine. rule: one given as an object, instead of a name."""
    acceptance, device = rule or config.acceptance, target.backend.device
    coupled = acceptance != "auto" and rule_for(acceptance, Draft.empty(0, device)).coupled
    if drafter == "auto":
        drafter = "suffix" if draft is None else "model"
    stops_early = config.num_draft_tokens == "auto" and device.type == "cpu"
    setup = drafters.Setup(device, target.backend.vocab_size, draft, coupled, stops_early)
    built = drafters.load(drafter, setup) if isinstance(drafter, str) else drafter
    if not isinstance(built, Drafter):
        raise UsageError(f"drafter={drafter!r}; allowed: a name or an object with propose(rows, lengths, sampler)")
    count, limit = _num_draft_tokens(config, name_of(drafter)), target.longest_draft
    if limit is not None and count > limit:
        raise UsageError(
            f"num_draft_tokens={count}; allowed: at most {limit} in reproducible mode, or reproducible=False"
        )
    return name_of(drafter), Engine(target, built, Fixed(count), acceptance, config.max_batch_size, draft)


def name_of(choice: object) -> str:
    """The name of a drafter or rule, whichever way it was given."""
    if isinstance(choice, Rule):
        return choice.name
    return choice if isinstance(choice, str) else type(choice).__name__


def _num_draft_tokens(config: DecoderConfig, drafter: str) -> int:
    if not isinstance(config.num_draft_tokens, str):
        return config.num_draft_tokens
    return DEFAULT_DRAFT_TOKENS.get(drafter.partition(":")[0], OTHER_DRAFT_TOKENS)
