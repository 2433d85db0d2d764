"""What Hugging Face `generate` was asked for, in Slipstream's terms: one `SamplingParams` and one watch per row.

`generate` hands its decoding loop finished lists of logits processors and stopping criteria. The processors that
`SamplingParams` knows become its fields where order and meaning coincide exactly; all others are called as `generate`
calls them. This module knows neither decoders nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation import stopping_criteria as hf_stopping

from slipstream.params import LARGEST, Processor, SamplingParams
from slipstream.sampling import NEVER, check_stateless
from slipstream.types import UsageError

Criterion = Callable[[Tensor, None], Any]

# option -> the values that ask for nothing
REFUSED: dict[str, tuple[object, ...]] = {
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
# temperature, top-k, top-p and min-p in the order in which both sides apply them: class, field, attribute
WARPERS: tuple[tuple[type[Any], str, str], ...] = (
    (hf.TemperatureLogitsWarper, "temperature", "temperature"),
    (hf.TopKLogitsWarper, "top_k", "top_k"),
    (hf.TopPLogitsWarper, "top_p", "top_p"),
    (hf.MinPLogitsWarper, "min_p", "min_p"),
)


def refuse_options(config: Any, processors: Sequence[Any], criteria: Sequence[Any]) -> None:
    """Refuse, by name, what a speculative loop cannot honour. config: the `GenerationConfig` in force."""
    for name, allowed in REFUSED.items():
        value = getattr(config, name, None)
        if value not in allowed:
            values = ", ".join(map(repr, allowed))
            raise UsageError(f"{name}={value!r} cannot be combined with slipstream.custom_generate; allowed: {values}")
    for processor in processors:
        if type(processor) is hf.UnbatchedClassifierFreeGuidanceLogitsProcessor:
            raise UsageError("logits_processor: classifier-free guidance runs the model itself; allowed: none of it")
    for criterion in criteria:
        if type(criterion) is hf_stopping.ConfidenceCriteria:
            raise UsageError("stopping_criteria: ConfidenceCriteria reads scores; allowed: criteria that read input_ids")


@dataclass(frozen=True)
class PaddedPrompt:
    """One row of `generate`'s input. padding: [1, P] the masked ids left of it; tokens: the others."""

    index: int
    padding: Tensor
    tokens: list[int]

    @property
    def width(self) -> int:
        """Its length as `generate` counts it, padding included."""
        return self.padding.shape[1] + len(self.tokens)


@dataclass(frozen=True)
class Options:
    """What all rows share. criteria: stopping criteria other than lengths and end tokens."""

    processors: tuple[Processor, ...]
    criteria: tuple[Criterion, ...]
    end_ids: frozenset[int]
    max_length: int
    do_sample: bool
    num_rows: int

    @classmethod
    def of(cls, processors: Sequence[Any], criteria: Sequence[Any], do_sample: bool, num_rows: int) -> Options:
        """Read `generate`'s lists."""
        lengths = [c.max_length for c in criteria if type(c) is hf_stopping.MaxLengthCriteria]
        if not lengths:
            raise UsageError("stopping_criteria holds no MaxLengthCriteria; allowed: the list that generate prepares")
        ends = [c for c in criteria if type(c) is hf_stopping.EosTokenCriteria]
        known = (hf_stopping.MaxLengthCriteria, hf_stopping.EosTokenCriteria)
        return cls(
            processors=tuple(processors),
            criteria=tuple(c for c in criteria if type(c) not in known),
            end_ids=frozenset(token for c in ends for token in c.eos_token_id.flatten().tolist()),
            max_length=min(lengths),
            do_sample=do_sample,
            num_rows=num_rows,
        )

    def params(self, prompt: PaddedPrompt, seed: int) -> SamplingParams:
        """The row's sampling options. Its end tokens are the loop's affair, so `ignore_eos` is set."""
        rest, fields = _last(self.processors) if self.do_sample else (list(self.processors), {"temperature": 0.0})
        first, rest = self._first(rest, prompt)
        called = [_for_row(processor, prompt.index, self.num_rows) for processor in rest]
        max_tokens = max(1, self.max_length - prompt.width)  # `generate` looks at the length after a token
        first["min_tokens"] = min(first.get("min_tokens", 0), max_tokens)
        processors = (RowProcessor(called, prompt.padding),) if called else ()
        return SamplingParams(
            **fields, **first, max_tokens=max_tokens, ignore_eos=True, seed=seed, logits_processors=processors
        )

    def watch(self, prompt: PaddedPrompt) -> Watch | None:
        """What looks at the row's tokens as they are committed."""
        return Watch(self.criteria, prompt, self.max_length) if self.criteria else None

    def _first(self, processors: list[Any], prompt: PaddedPrompt) -> tuple[dict[str, Any], list[Any]]:
        """The fields of `SamplingParams` that the list begins with, and the rest of the list.

        Fields act before `logits_processors`, in the order of the stages here; so only a beginning in that order
        keeps its meaning. A bias of -inf commutes with a penalty, so single bad words may come after it.
        """
        fields: dict[str, Any] = {}
        reached = -1
        for at, processor in enumerate(processors):
            stage, found = self._known(processor, prompt)
            if stage < reached or (stage == reached and stage < 3):
                return fields, processors[at:]
            reached = stage
            if "min_tokens" in found:
                found["min_tokens"] = max(found["min_tokens"], fields.get("min_tokens", 0))
            fields |= found
        return fields, []

    def _known(self, processor: Any, prompt: PaddedPrompt) -> tuple[int, dict[str, Any]]:
        """Stage and field of a processor; stage -2 if there is no field that means exactly the same."""
        kind = type(processor)
        if kind is hf.SequenceBiasLogitsProcessor:
            biases = processor.sequence_bias
            if all(len(ids) == 1 and abs(bias) <= LARGEST for ids, bias in biases.items()):
                return 0, {"logit_bias": {ids[0]: bias for ids, bias in biases.items()}}
        elif kind is hf.RepetitionPenaltyLogitsProcessor:
            if _ignored(processor, prompt.index) == prompt.padding.shape[1]:
                return 1, {"repetition_penalty": processor.penalty}
        elif kind is hf.NoBadWordsLogitsProcessor:
            if all(len(ids) == 1 for ids in processor.sequence_bias):
                return 2, {"bad_words": [list(ids) for ids in processor.sequence_bias]}
        elif kind in (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor):
            # the field also holds back stop strings, so it means the same only where there are no other criteria
            if not self.criteria and set(processor.eos_token_id.flatten().tolist()) == self.end_ids:
                return 3, {"min_tokens": max(0, _shortest(processor) - prompt.width)}
        return -2, {}


def _last(processors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The warpers that the list ends with as fields, and what comes before them; a final normalisation changes no law.

    Any other warper after or between them leaves all before it to be called, at temperature 1.
    """
    rest, fields, stage = list(processors), {"temperature": 1.0}, len(WARPERS)
    if rest and type(rest[-1]) is hf.LogitNormalization:
        rest.pop()
    while rest:
        at = next((i for i, (kind, *_) in enumerate(WARPERS) if type(rest[-1]) is kind), stage)
        if at >= stage or not _plain(rest[-1]):
            break
        _, name, attribute = WARPERS[at]
        fields[name], stage = getattr(rest.pop(), attribute), at
    return rest, fields


def _plain(warper: Any) -> bool:
    """Whether a warper does what the field of its name does."""
    if type(warper) is hf.TemperatureLogitsWarper:
        return True
    keeps_one = type(warper) is hf.TopKLogitsWarper or warper.min_tokens_to_keep == 1
    return warper.filter_value == NEVER and keeps_one and getattr(warper, "top_p", 1.0) > 0


def _ignored(penalty: Any, row: int) -> int:
    ignored = getattr(penalty, "prompt_ignore_length", None)  # the attribute of later versions
    return int(ignored[row]) if isinstance(ignored, Tensor) else ignored or 0


def _shortest(processor: Any) -> int:
    if type(processor) is hf.MinLengthLogitsProcessor:
        return int(processor.min_length)
    return int(processor.prompt_length_to_skip + processor.min_new_tokens)


def _for_row(processor: Any, row: int, num_rows: int) -> Any:
    """The processor as it treats row number `row`: those that know the batch by its rows are narrowed to one."""
    kind, made = type(processor), copy(processor)
    if kind is hf.RepetitionPenaltyLogitsProcessor:
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
            made.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    elif kind is hf.EncoderRepetitionPenaltyLogitsProcessor:
        at = row * processor.encoder_input_ids.shape[0] // num_rows
        made.encoder_input_ids = processor.encoder_input_ids[at : at + 1]
    elif kind is hf.EncoderNoRepeatNGramLogitsProcessor:
        at = row * processor.batch_size // num_rows
        made.generated_ngrams, made.batch_size = processor.generated_ngrams[at : at + 1], 1
    elif kind is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        made._prefix_allowed_tokens_fn = lambda _, sent: allowed(row, sent)
    else:
        return processor
    return made


class RowProcessor:
    """`generate`'s processors for one row, shown what `generate` shows them: the row with its left padding."""

    def __init__(self, processors: Sequence[Processor], padding: Tensor) -> None:
        self._processors, self._padding = processors, padding
        self._checked = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [1, n] without padding; scores: [1, V] -> [1, V]."""
        ids = torch.cat([self._padding.to(input_ids.device), input_ids], dim=1)
        for processor in self._processors:
            scores = processor(ids, scores) if self._checked else check_stateless(processor, ids, scores)
        self._checked = True
        return scores


class Watch:
    """Asks stopping criteria after every committed token of one row: input_ids [1, n] with padding, scores None."""

    def __init__(self, criteria: Sequence[Criterion], prompt: PaddedPrompt, max_length: int) -> None:
        self._criteria, self._length = criteria, prompt.width
        self._ids = prompt.padding.new_zeros(1, max(max_length, prompt.width + 1))
        self._ids[:, : prompt.width] = torch.cat([prompt.padding, prompt.padding.new_tensor([prompt.tokens])], dim=1)

    def __call__(self, token: int) -> bool:
        """Whether the row ends with this token."""
        self._ids[0, self._length] = token
        self._length += 1
        answers = [torch.as_tensor(criterion(self._ids[:, : self._length], None)) for criterion in self._criteria]
        for criterion, answer in zip(self._criteria, answers, strict=True):
            if answer.numel() != 1:
                raise UsageError(
                    f"stopping_criteria: {type(criterion).__name__} gave {answer.numel()} answers for one row; "
                    "allowed: one per row of input_ids"
                )
        return any(map(bool, answers))
