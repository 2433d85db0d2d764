"""Turns Hugging Face logits processors into fields of `SamplingParams` if order and meaning match exactly.

All others stay processors and are called as `generate` calls them. This module knows neither decoders nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from slipstream.sampling.params import LARGEST, Processor
from slipstream.sampling.processors import ask, check_stateless
from slipstream.sampling.warpers import NEVER

# temperature, top-k, top-p and min-p in the order in which both sides apply them: class, field, attribute
WARPERS: tuple[tuple[type[Any], str, str], ...] = (
    (hf.TemperatureLogitsWarper, "temperature", "temperature"),
    (hf.TopKLogitsWarper, "top_k", "top_k"),
    (hf.TopPLogitsWarper, "top_p", "top_p"),
    (hf.MinPLogitsWarper, "min_p", "min_p"),
)
BIAS, PENALTY, BAD_WORDS, LENGTH = range(4)  # the stages that come before `logits_processors`, in their order
UNKNOWN = -2


@dataclass(frozen=True)
class PaddedPrompt:
    """One row of `generate`'s input."""

    index: int
    padding: Tensor  # [1, P] the masked ids to the left of `tokens`
    tokens: list[int]

    @property
    def width(self) -> int:
        """The row's length including padding, as `generate` counts it."""
        return self.padding.shape[1] + len(self.tokens)


def last_fields(processors: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The warpers at the end of a sampling list as fields, and the processors before them.

    Reading from the end stops at a processor that has no field or is out of order: it and all before it stay
    processors, including a temperature. A final normalization is dropped, as it changes no distribution.
    """
    rest = list(processors)
    fields = {"temperature": 1.0}
    stage = len(WARPERS)
    if rest and type(rest[-1]) is hf.LogitNormalization:
        rest.pop()
    while rest:
        index = next((i for i, (kind, *_) in enumerate(WARPERS) if type(rest[-1]) is kind), stage)
        if index >= stage or not _plain(rest[-1]):
            break
        _, name, attribute = WARPERS[index]
        fields[name], stage = getattr(rest.pop(), attribute), index
    return fields, rest


def _plain(warper: Any) -> bool:
    """True if a warper does exactly what the field of its name does."""
    kind = type(warper)
    if kind is hf.TemperatureLogitsWarper:
        return True
    keeps_one = kind is hf.TopKLogitsWarper or warper.min_tokens_to_keep == 1
    return warper.filter_value == NEVER and keeps_one and (kind is not hf.TopPLogitsWarper or warper.top_p > 0)


def first_fields(
    processors: Sequence[Any], prompt: PaddedPrompt, end_ids: frozenset[int] | None
) -> tuple[dict[str, Any], list[Any]]:
    """The fields of `SamplingParams` that a list begins with, and the rest of the list.

    end_ids: the row's end tokens; None if anything else may end it, which the field `min_tokens` would hold back.
    Fields act before `logits_processors`, stage by stage, so only a beginning in that order keeps its meaning. (Bad
    words of one token share the first stage with the bias; -inf commutes with a penalty.)
    """
    fields: dict[str, Any] = {}
    reached = -1
    for index, processor in enumerate(processors):
        stage, field = _field_of(processor, prompt, end_ids)
        if stage < reached or (stage == reached and stage != LENGTH):
            return fields, list(processors[index:])
        if stage == reached:
            field["min_tokens"] = max(field["min_tokens"], fields["min_tokens"])
        fields, reached = fields | field, stage
    return fields, []


def _field_of(processor: Any, prompt: PaddedPrompt, end_ids: frozenset[int] | None) -> tuple[int, dict[str, Any]]:
    """Stage and field of a processor, or UNKNOWN if no field means exactly the same."""
    kind = type(processor)
    if kind is hf.SequenceBiasLogitsProcessor:
        biases = processor.sequence_bias
        if all(len(ids) == 1 and abs(bias) <= LARGEST for ids, bias in biases.items()):
            return BIAS, {"logit_bias": {ids[0]: bias for ids, bias in biases.items()}}
    elif kind is hf.RepetitionPenaltyLogitsProcessor:
        if _ignored(processor, prompt.index) == prompt.padding.shape[1]:
            return PENALTY, {"repetition_penalty": processor.penalty}
    elif kind is hf.NoBadWordsLogitsProcessor:
        if all(len(ids) == 1 for ids in processor.sequence_bias):
            return BAD_WORDS, {"bad_words": [list(ids) for ids in processor.sequence_bias]}
    elif kind is hf.MinLengthLogitsProcessor:
        if _ids(processor.eos_token_id) == end_ids:
            return LENGTH, {"min_tokens": max(0, processor.min_length - prompt.width)}
    elif kind is hf.MinNewTokensLengthLogitsProcessor and _ids(processor.eos_token_id) == end_ids:
        shortest = processor.prompt_length_to_skip + processor.min_new_tokens
        return LENGTH, {"min_tokens": max(0, shortest - prompt.width)}
    return UNKNOWN, {}


def _ignored(penalty: Any, row: int) -> int:
    """Number of leading tokens that a repetition penalty ignores in a row."""
    ignored = penalty.prompt_ignore_length
    return int(ignored[row]) if isinstance(ignored, Tensor) else ignored or 0


def _ids(tensor: Tensor) -> frozenset[int]:
    return frozenset(tensor.flatten().tolist())


def for_row(processor: Any, row: int, num_rows: int) -> Any:
    """The processor for one row: if it holds data of every row of the batch, a copy with only that row's."""
    kind = type(processor)
    narrowed = copy(processor)
    if kind is hf.RepetitionPenaltyLogitsProcessor:
        if isinstance(processor.prompt_ignore_length, Tensor):
            narrowed.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    elif kind is hf.EncoderRepetitionPenaltyLogitsProcessor:
        first = row * processor.encoder_input_ids.shape[0] // num_rows  # not repeated for num_return_sequences
        narrowed.encoder_input_ids = processor.encoder_input_ids[first : first + 1]
    elif kind is hf.EncoderNoRepeatNGramLogitsProcessor:
        first = row * processor.batch_size // num_rows
        narrowed.generated_ngrams, narrowed.batch_size = processor.generated_ngrams[first : first + 1], 1
    elif kind is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        narrowed._prefix_allowed_tokens_fn = lambda _, sent: allowed(row, sent)
    else:
        return processor
    return narrowed


class RowProcessor:
    """`generate`'s processors for one row; they see the row with its left padding, as in `generate`."""

    def __init__(self, processors: Sequence[Processor], padding: Tensor) -> None:
        self._processors, self._padding = processors, padding
        self._checked = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [1, n] without padding; scores: [1, V] -> [1, V]. A processor with state is refused by name."""
        ids = torch.cat([self._padding.to(input_ids.device), input_ids], dim=1)
        for processor in self._processors:
            scores = (ask if self._checked else check_stateless)(processor, ids, scores)
        self._checked = True
        return scores
