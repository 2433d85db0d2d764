"""Reads the arguments of Hugging Face `generate`: prompts, sampling options and stopping criteria.

Refuses, by name, what cannot be honored. Knows neither decoders nor models.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import logits_process as hf
from transformers.generation import stopping_criteria as hf_stopping

from slipstream.errors import MODEL_ERRORS, UsageError
from slipstream.integrations.transformers.hf_processors import (
    PaddedPrompt,
    RowProcessor,
    first_fields,
    for_row,
    last_fields,
)
from slipstream.models.hf.prepared_inputs import NAMES
from slipstream.models.hf.state_trials import differ
from slipstream.models.hf.trials import a_few_tokens
from slipstream.sampling.params import Processor, SamplingParams
from slipstream.text.requests import MEDIA

Criterion = Callable[[Tensor, None], Any]

log = logging.getLogger("slipstream")

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
ENCODED = "mm_encoder_outputs"  # images and videos as `generate` has encoded them, by kind
HARMLESS = ("use_cache", "logits_to_keep")  # inputs of the model that change no text
ROW_ENDS = (hf_stopping.MaxLengthCriteria, hf_stopping.EosTokenCriteria)  # a row checks these itself
# option -> the values that a speculative loop can honor
ALLOWED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static"),
}
ALONE = "a call without custom_generate"  # honors every option
LOGPROBS = "logprobs=... of SpeculativeDecoder.generate"
INSTEAD = {"output_scores": LOGPROBS, "output_logits": LOGPROBS}  # what to use for an option here
# options of assisted generation: the values that say nothing (the last is `generate`'s default), and what to write here
UNREAD: dict[str, tuple[tuple[object, ...], str]] = {
    "prompt_lookup_num_tokens": ((None,), "drafter='ngram', num_draft_tokens=..."),
    "assistant_early_exit": ((None,), "drafter='layer_skip:...'"),
    "num_assistant_tokens": ((None, 20), "num_draft_tokens=..."),
    "num_assistant_tokens_schedule": ((None, "constant"), "num_draft_tokens='heuristic'"),
    "assistant_confidence_threshold": ((None, 0.4), "num_draft_tokens='confidence:...'"),
}


def refuse_options(config: Any, processors: Sequence[Any], criteria: Sequence[Any]) -> None:
    """Refuse, by name, options that a speculative loop cannot honor. config: the `GenerationConfig` in force."""
    for name, allowed in ALLOWED.items():
        value = getattr(config, name, None)
        if value not in allowed:
            *values, last = (*map(repr, allowed), *filter(None, [INSTEAD.get(name)]), ALONE)
            raise UsageError(
                f"{name}={value!r} cannot be combined with slipstream.custom_generate; "
                f"allowed: {', '.join(values)}, or {last}"
            )
    if any(type(processor) is hf.UnbatchedClassifierFreeGuidanceLogitsProcessor for processor in processors):
        raise UsageError(
            f"logits_processor: classifier-free guidance runs the model itself; allowed: other processors, or {ALONE}"
        )
    if any(type(criterion) is hf_stopping.ConfidenceCriteria for criterion in criteria):
        raise UsageError(
            f"stopping_criteria: ConfidenceCriteria reads scores; allowed: criteria that read input_ids, or {ALONE}"
        )


def warn_of_unread_options(config: Any) -> None:
    """Log a warning for options of assisted generation that change its speed and have no effect here."""
    for name, (neutral, instead) in UNREAD.items():
        value = getattr(config, name, None)
        if value not in neutral:
            _warn_once(f"{name}={value!r} has no effect with slipstream.custom_generate, which takes {instead}")


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def refuse_row_hooks(model: Any) -> None:
    """Refuse, by name, options that a library applies row by row through hooks, such as PEFT's adapter_names."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            for name, value in (hook.keywords if isinstance(hook, partial) else {}).items():
                if isinstance(value, list | tuple):
                    raise UsageError(
                        f"{name}={value!r:.60} cannot be combined with slipstream.custom_generate, which decodes rows "
                        "on their own; allowed: one choice for all rows, such as model.set_adapter(...)"
                    )


def read_prompts(model: Any, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[PaddedPrompt]:
    """The rows of input_ids [B, n] without their left padding; other inputs of the model are refused."""
    inputs = {name: value for name, value in model_kwargs.items() if value is not None and name not in HARMLESS}
    mask = inputs.pop("attention_mask", torch.ones_like(input_ids)).bool()
    positions = inputs.pop("position_ids", None)
    for name in inputs.keys() & set(NAMES):
        if _is_new(inputs[name]):
            del inputs[name]
    for kind in inputs.pop(ENCODED, {}):  # `generate` has encoded pixel_values and the like; {} for a text
        raise UsageError(f"{kind} input is given; allowed: text only, as input_ids and attention_mask")
    for name, value in inputs.items():
        if any(kind in name for kind in MEDIA):
            raise UsageError(f"{name} is given; allowed: text only, as input_ids and attention_mask")
        if not _is_default_type(model, name, value):
            what = "past_key_values (cache)" if name in NAMES else name
            raise UsageError(f"{what} is given; allowed: input_ids and attention_mask only")
    if input_ids.shape != mask.shape:
        raise UsageError(f"attention_mask {list(mask.shape)}, input_ids {list(input_ids.shape)}; allowed: one shape")
    if positions is not None and bool(((positions != mask.cumsum(1) - 1) & mask).any()):
        raise UsageError("position_ids differ from those that attention_mask implies; allowed: none, or just these")
    prompts = []
    for row, (ids, real) in enumerate(zip(input_ids, mask, strict=True)):
        start = len(real) - int(real.sum())
        if start == len(real) or not bool(real[start:].all()):
            raise UsageError(f"attention_mask: row {row} is not padding, then tokens; allowed: padding on the left")
        prompts.append(PaddedPrompt(row, ids[None, :start], ids[start:].tolist()))
    return prompts


@torch.inference_mode()
def _is_default_type(model: Any, name: str, value: Any) -> bool:
    """True if an input only marks every token as text, as processors of multimodal models do.

    It is then all zeros, and the model returns the same logits without it; GPT-2 would add an embedding for zeros.
    """
    if not isinstance(value, Tensor) or value.is_floating_point() or bool(value.any()):
        return False
    tokens = a_few_tokens(model.config.get_text_config().vocab_size, model.device)
    try:
        logits = model(input_ids=tokens, use_cache=False, **{name: torch.zeros_like(tokens)}).logits
    except MODEL_ERRORS:
        return False
    return not differ(model, logits)


def _is_new(cache: Any) -> bool:
    """True if `generate` has just made this cache, so that nothing has been read into it."""
    if getattr(cache, "_is_user_defined", False):
        return False
    layers = getattr(cache, "layers", [])
    flags = (getattr(layer, "has_previous_state", False) for layer in layers)  # of recurrent ones, by state
    recurrent = [any(flag.values()) if isinstance(flag, dict) else bool(flag) for flag in flags]
    attention = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
    return not any(recurrent) and all(layer.get_seq_length() == 0 for layer in attention)


@dataclass(frozen=True)
class Options:
    """The options that all rows share."""

    processors: tuple[Processor, ...]
    criteria: tuple[Criterion, ...]  # stopping criteria other than lengths and end tokens
    end_ids: frozenset[int]
    max_length: int
    do_sample: bool
    num_rows: int
    pad_id: int | None  # pads finished rows
    pads: bool  # if false, finished rows run on until the last row stops, as in `generate` without end tokens

    @classmethod
    def read(cls, config: Any, processors: Sequence[Any], criteria: Sequence[Any], num_rows: int) -> Options:
        """Read what `generate` prepared."""
        lengths = [c.max_length for c in criteria if type(c) is hf_stopping.MaxLengthCriteria]
        if not lengths:
            raise UsageError("stopping_criteria holds no MaxLengthCriteria; allowed: the list that generate prepares")
        ends = [c for c in criteria if type(c) is hf_stopping.EosTokenCriteria]
        pad_id = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
        pads = any(hasattr(c, "eos_token_id") for c in criteria)  # the same test as in `generate`
        if pads and pad_id is None:
            raise UsageError("pad_token_id=None with an end token; allowed: a token id")
        is_timed = any(isinstance(c, hf_stopping.MaxTimeCriteria) for c in criteria)  # no time is left to run on
        return cls(
            processors=tuple(processors),
            criteria=tuple(c for c in criteria if type(c) not in ROW_ENDS),
            end_ids=frozenset(token for c in ends for token in c.eos_token_id.flatten().tolist()),
            max_length=min(lengths),
            do_sample=bool(config.do_sample),
            num_rows=num_rows,
            pad_id=pad_id,
            pads=pads or (is_timed and pad_id is not None),
        )

    def params(self, prompt: PaddedPrompt, seed: int) -> SamplingParams:
        """The row's sampling options. End tokens are set on the row itself, so `ignore_eos` is true."""
        last, rest = last_fields(self.processors) if self.do_sample else ({"temperature": 0.0}, self.processors)
        first, rest = first_fields(rest, prompt, None if self.criteria else self.end_ids)
        called = [for_row(processor, prompt.index, self.num_rows) for processor in rest]
        max_tokens = max(1, self.max_length - prompt.width)  # `generate` checks the length only after a token
        return SamplingParams(
            **last,
            **first | {"min_tokens": min(first.get("min_tokens", 0), max_tokens)},
            max_tokens=max_tokens,
            ignore_eos=True,
            seed=seed,
            logits_processors=(RowProcessor(called, prompt.padding),) if called else (),
        )

    def watch(self, prompt: PaddedPrompt) -> Watch | None:
        """A callable that checks the criteria after every committed token of the row; None without criteria."""
        return Watch(self.criteria, prompt, self.max_length) if self.criteria else None


class Watch:
    """Calls stopping criteria after every committed token of a row, with padded input_ids [1, n] and scores None."""

    def __init__(self, criteria: Sequence[Criterion], prompt: PaddedPrompt, max_length: int) -> None:
        self._criteria, self._length = criteria, prompt.width
        self._ids = prompt.padding.new_zeros(1, max(max_length, prompt.width + 1))
        self._ids[:, : prompt.width] = torch.cat([prompt.padding, prompt.padding.new_tensor([prompt.tokens])], dim=1)

    def __call__(self, tokens: Sequence[int], first: int) -> int | None:
        """The number of the token with which the row ends; see `Row.find_stop`."""
        for number, token in enumerate(tokens, 1):
            self._ids[0, self._length] = token
            self._length += 1
            is_over = any([self._ask(criterion) for criterion in self._criteria])  # like `generate`, call all of them
            if is_over and number >= first:
                return number
        return None

    def _ask(self, criterion: Criterion) -> bool:
        answer = torch.as_tensor(criterion(self._ids[:, : self._length], None))
        if answer.numel() != 1:
            raise UsageError(
                f"stopping_criteria: {type(criterion).__name__} returned {answer.numel()} answers for one row; "
                "allowed: one per row of input_ids"
            )
        return bool(answer)


@dataclass(frozen=True)
class NotPassedOn:
    """Arguments of `generate` that it does not pass on to a callable (transformers 5.17 to 5.24).

    `generate` compares the callable's signature with what is left in its `**kwargs`
    (`GenerationMixin._extract_generation_mode_kwargs`), and its own named parameters are never there: naming
    `assistant_model`, `streamer` or `synced_gpus` in `CustomGenerate.__call__` gives None whatever the caller said.
    `assistant_model=draft` is how users of transformers give a draft model, and a streamer that stays silent would be
    an option accepted and ignored, so they are read from the frame of the call. `draft=` needs no frame. `tokenizer`
    and `assistant_tokenizer` are dropped from its `**kwargs` before any callable is asked; the frame that calls
    `generate`, of PyTorch's decorator, still has them.
    """

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None

    @classmethod
    def from_frame(cls, model: Any) -> NotPassedOn:
        """Read from the frame of the `generate` call that is under way for this model."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is GENERATE and frame.f_locals["self"] is model:
                above = {} if frame.f_back is None else frame.f_back.f_locals.get("kwargs", {})
                arguments = {
                    option.name: frame.f_locals.get(option.name, above.get(option.name)) for option in fields(cls)
                }
                return cls(**arguments)
            frame = frame.f_back
        return cls()
