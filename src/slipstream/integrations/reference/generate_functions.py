"""`autoregressive_generate`, `speculative_generate` and `speculative_generate_batch` under their known signatures.

All three are one loop, Slipstream's. Options are explained at `Options`; three of the originals have no effect:
`pad_token_id`, as rows are never padded; `use_cache`, as keys and values are always cached within a call; and
`first_target`, as the prompt is scored together with the first draft.
Seeds come from torch's global generator, one per row, so `torch.manual_seed` makes sampled output repeatable.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Module

from slipstream.checks import check_whole, is_whole
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.integrations.decoder_cache import DecoderSettings, cached_settings, decoder_for
from slipstream.integrations.reference.logits_processor import (
    UNADJUSTED,
    GreedyProcessor,
    Processor,
    Sampling,
    check_processor,
    sampling_of,
)
from slipstream.sampling.params import SamplingParams
from slipstream.text.results import Result, Stats

log = logging.getLogger("slipstream")
MAX_ROWS = 1024  # the caller chooses the batch size; memory is reserved only for the rows of a call
GREEDY = GreedyProcessor()
EndIds = int | Sequence[int] | None


@runtime_checkable
class TokenNames(Protocol):
    """The part of a tokenizer that the functions use; Hugging Face's tokenizers have it."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Names of tokens, for debug output."""

    def get_vocab(self) -> dict[str, int]:
        """Token strings to ids."""


@dataclass(frozen=True)
class Options:
    """One call's options; UsageError names the one that is wrong."""

    logits_processor: Processor
    max_gen_len: int  # most tokens to generate; fewer (with a line in the log) if the model's context ends before
    eos_tokens_id: EndIds  # ids that end the output and are its last token; None: nothing ends it
    tokenizer: Any
    debug: bool  # print every round to stderr
    gamma: int = 0  # draft tokens per round; 0 is plain decoding
    skip_sample_adjustment: bool = False  # lossy; see `speculative_generate`

    def __post_init__(self) -> None:
        check_processor(self.logits_processor)
        if self.tokenizer is not None and not isinstance(self.tokenizer, TokenNames):
            raise UsageError(f"tokenizer={self.tokenizer!r}; allowed: None or a Hugging Face tokenizer")
        check_whole("gamma", self.gamma, 0, MAX_DRAFT_TOKENS)
        check_whole("max_gen_len", self.max_gen_len, 1)

    def end_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The ids that end the output; UsageError for one that the model does not have."""
        ends = self.eos_tokens_id
        ids = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        if not all(is_whole(token, 0, vocab_size - 1) for token in ids):
            raise UsageError(
                f"eos_tokens_id={ends!r}; allowed: a token id from 0 to {vocab_size - 1}, a list of them, or None"
            )
        return ids


def round_line(round: Round, number: int, tokenizer: TokenNames | None) -> str:
    """One line about a round: tokens accepted on the main chain and on a branch, rejected ones, and the next token.

    Tokens are shown by name, or by id without a tokenizer. "unused" are draft tokens after the end of the output, which
    were neither accepted nor rejected.
    """
    accepted = round.num_accepted_tokens
    fate = "rejected" if round.rejected or round.path is not None else "unused"
    parts = [
        ("accepted", round.tokens[: round.num_accepted_on_chain]),
        ("branch", round.tokens[round.num_accepted_on_chain : accepted]),
        (fate, round.unaccepted),
        *((round.origins[i], round.tokens[i : i + 1]) for i in range(accepted, len(round.tokens))),
    ]
    words = [f"{what} {_names(tokens, tokenizer)}" for what, tokens in parts if tokens]
    end = [f"end ({round.finish_reason})"] if round.finish_reason else []
    return f"row {round.row} round {number}: {', '.join(words + end)}"


def _names(tokens: Sequence[int], tokenizer: TokenNames | None) -> str:
    return str(list(tokens) if tokenizer is None else tokenizer.convert_ids_to_tokens(list(tokens)))


def decoder_of(target: Module, drafter: Module | None, tokenizer: Any = None) -> SpeculativeDecoder:
    """The cached decoder over these models, with an empty KV cache.

    drafter: None keeps that of the last call, for requests that draft nothing. tokenizer: of both models, needed if
    their heads differ in size.
    """
    for name, model in (("target", target), ("drafter", drafter)):
        if not isinstance(model, Module) and (name == "target" or model is not None):
            raise UsageError(
                f"{name} is a {type(model).__name__}; allowed: a loaded Hugging Face causal language model"
            )
    last = cached_settings(target)
    if last is not None and last.max_batch_size == MAX_ROWS and drafter in (None, last.draft) and tokenizer is None:
        settings = last
    else:
        settings = DecoderSettings(
            draft=drafter,
            tokenizer=tokenizer,
            drafter="none" if drafter is None else "model",
            num_draft_tokens=0 if drafter is None else 1,  # each request sets its own
            max_batch_size=MAX_ROWS,
        )
    decoder = decoder_for(target, settings)
    decoder.forget()
    return decoder


Ids = Sequence[int]


def autoregressive_generate(
    inputs: Ids,
    model: Module,
    max_gen_len: int = 40,
    logits_processor: Processor = GREEDY,
    eos_tokens_id: EndIds = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    debug: bool = False,
    tokenizer: Any = None,
) -> list[int]:
    """Plain decoding of one prompt: the new token ids, up to and including an end token.

    Options: see `Options`. UsageError for wrong ones, and for a prompt that fills the model's context.
    """
    options = Options(logits_processor, max_gen_len, eos_tokens_id, tokenizer, debug)
    return _decode([_ids("inputs", inputs)], model, None, options)[0].token_ids


def speculative_generate(
    inputs: Ids,
    drafter: Module,
    target: Module,
    tokenizer: Any = None,
    gamma: int = 5,
    logits_processor: Processor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: EndIds = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
) -> tuple[list[int], float]:
    """Speculative decoding of one prompt: the new token ids, an end token included, and the acceptance rate.

    The rate is accepted / drafted, 0.0 if nothing was drafted (gamma=0, or one token asked for).

    skip_sample_adjustment: lossy. After a rejection the next token is sampled from p instead of (p - q)+, so the output
    no longer follows the target's distribution; a warning says so. Greedy output needs no adjustment and stays exact.
    Other options: see `Options`. UsageError for wrong ones, and for a prompt that fills the model's context.
    """
    options = Options(logits_processor, max_gen_len, eos_tokens_id, tokenizer, debug, gamma, skip_sample_adjustment)
    result = _decode([_ids("inputs", inputs)], target, _required(drafter), options)[0]
    return result.token_ids, result.stats.acceptance_rate or 0.0


def speculative_generate_batch(
    inputs: Sequence[Ids],
    drafter: Module,
    target: Module,
    tokenizer: Any = None,
    gamma: int = 5,
    logits_processor: Processor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: EndIds = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = True,
    skip_sample_adjustment: bool = False,
    debug: bool = False,
) -> tuple[list[list[int]], list[float], list[Stats]]:
    """Speculative decoding of unpadded prompts together: new token ids, acceptance rate and statistics per row.

    The outputs are lists of their own lengths, padded with nothing, and a row does not depend on the others. The rate
    is accepted / drafted (`Stats.acceptance_rate`; `Stats.alpha` counts otherwise), 0.0 if nothing was drafted.
    Options: as for `speculative_generate`.
    """
    options = Options(logits_processor, max_gen_len, eos_tokens_id, tokenizer, debug, gamma, skip_sample_adjustment)
    if not isinstance(inputs, list | tuple):
        raise UsageError(f"inputs is a {type(inputs).__name__}; allowed: a list of unpadded lists of token ids")
    prompts = [_ids(f"inputs[{i}]", prompt) for i, prompt in enumerate(inputs)]
    results = _decode(prompts, target, _required(drafter), options)
    rates = [result.stats.acceptance_rate or 0.0 for result in results]
    return [result.token_ids for result in results], rates, [result.stats for result in results]


def _decode(prompts: list[list[int]], target: Module, drafter: Module | None, options: Options) -> list[Result]:
    decoder = decoder_of(target, drafter, options.tokenizer)
    backend = decoder.target.backend
    ends = options.end_ids(backend.vocab_size)
    sampling = sampling_of(options.logits_processor, backend.vocab_size, backend.device)
    decoder = _with_rule(decoder, sampling, options.skip_sample_adjustment)
    base = replace(sampling.params, num_draft_tokens=options.gamma, ignore_eos=True, stop_token_ids=ends)
    params = [_with_length(base, prompt, options.max_gen_len, backend.max_length) for prompt in prompts]
    rows = decoder.rows(prompts, [replace(row_params, seed=seed_from_torch()) for row_params in params])
    for round in decoder.run(rows):
        if options.debug:
            print(round_line(round, len(rows[round.row].rounds), options.tokenizer), file=sys.stderr)
    for row in rows:
        if row.error is not None:
            raise row.error
    return [decoder.result(row) for row in rows]


def _with_rule(decoder: SpeculativeDecoder, sampling: Sampling, skip_sample_adjustment: bool) -> SpeculativeDecoder:
    """The decoder with the rule that the processor's own draws or skip_sample_adjustment require."""
    if sampling.rule is not None:
        if skip_sample_adjustment:
            raise UsageError(
                "skip_sample_adjustment=True with a processor that has a `sample` of its own, whose drafts are never "
                "adjusted; allowed: False, or `sample` inherited from GreedyProcessor or MultinomialProcessor"
            )
        return decoder.using(acceptance=sampling.rule)
    if skip_sample_adjustment and sampling.params.temperature:
        log.warning("skip_sample_adjustment=True is lossy: the output does not follow the target's distribution")
        return decoder.using(acceptance=UNADJUSTED)
    return decoder


def _with_length(params: SamplingParams, prompt: list[int], max_gen_len: int, context: int) -> SamplingParams:
    """Options for one prompt; as in the originals, the output ends at the end of the model's context."""
    room = max(context - len(prompt), 1)  # a prompt that leaves no room is refused later, with other wrong prompts
    if room < max_gen_len:
        log.warning("max_gen_len=%d is cut to %d: the model's context is %d tokens", max_gen_len, room, context)
    return replace(params, max_tokens=min(max_gen_len, room))


def seed_from_torch() -> int:
    """A seed from torch's global generator."""
    return int(torch.randint(1 << 62, ()))


def _required(drafter: Module | None) -> Module:
    if drafter is None:
        raise UsageError("drafter=None; allowed: a loaded Hugging Face causal language model")
    return drafter


def _ids(name: str, prompt: Any) -> list[int]:
    """A prompt as a list of token ids; one-dimensional tensors count as lists."""
    ids = prompt.tolist() if isinstance(prompt, Tensor) and prompt.dim() == 1 else prompt
    is_list = isinstance(ids, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not is_list or not ids:
        raise UsageError(f"{name}={prompt!r:.80}; allowed: a list of at least one token id (one prompt, not padded)")
    return list(ids)
