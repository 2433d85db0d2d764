"""Speculative decoding inside Hugging Face `generate`: `generate(..., custom_generate=slipstream.custom_generate)`.

`generate` (transformers 5.17 to 5.24) prepares inputs, processors and criteria as usual; only its loop is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from slipstream.config import DecoderConfig
from slipstream.core.acceptance import Rule
from slipstream.core.interfaces import Drafter
from slipstream.core.types import Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.integrations.decoder_cache import DecoderSettings, decoder_for
from slipstream.integrations.transformers.generate_options import (
    NotPassedOn,
    Options,
    read_prompts,
    refuse_options,
    refuse_row_hooks,
    warn_of_unread_options,
)
from slipstream.integrations.transformers.hf_processors import PaddedPrompt
from slipstream.models.hf.model_view import unwrapped
from slipstream.text.results import Stats


@dataclass(frozen=True, kw_only=True)
class CustomGenerate:
    """A loop for `generate`: exact, in batches, with a drafter. `slipstream.custom_generate` has the defaults.

    draft: a loaded model or a name; drafter, num_draft_tokens, acceptance, max_batch_size, tokenizer, draft_tokenizer:
    as in `SpeculativeDecoder`; a draft model of another vocabulary needs both tokenizers. All may also be given to
    `generate` itself for one call; `assistant_model=` and `assistant_tokenizer=` are other names for `draft=` and
    `draft_tokenizer=` (with `assistant_model=`, `generate` itself refuses num_return_sequences > 1; `draft=` takes it).

    Greedy output equals that of plain `generate`, except where two tokens tie within rounding; sampled output has the
    same distribution. Each row's seed comes from torch's global generator: after the same `torch.manual_seed`, a call
    returns the same output again. Under acceptance "match" (the default) it does so with any drafter, except where two
    tokens tie within rounding.

    What differs:
    - Processors and criteria are called with one row at a time, [1, n], padding included; processors must be stateless.
      Criteria get scores=None. A criterion with state sees the rows' tokens in another order than in `generate`.
    - `stop_strings` in a `GenerationConfig` reach no callable; `stop_strings=` and a `StopStringCriteria` do.
    - `use_cache`, static and offloaded caches have no effect: the KV cache is Slipstream's own. The model keeps it, and
      the draft model, for later calls, as long as the model itself lives. `past_key_values` of the output is None.
    - `prompt_lookup_num_tokens`, `num_assistant_tokens` and the like are not read, as they affect only speed; the log
      names them once, with their replacements. An assistant model's own settings are not read either.
    - Where `max_time` or a criterion stops rows of a batch that has no end token, they run on until the last one stops,
      as in `generate`; with a pad token, rows stopped by `max_time` are padded instead.
    - The output with `return_dict_in_generate` has two more attributes: `slipstream_stats` (`Stats` of all rows) and
      `slipstream_results` (a `Result` per row).

    Raises `UsageError`, which names the option, for whatever cannot be honored: beams, contrastive search, guidance,
    scores, logits, attentions, hidden states, a given cache, embeddings, padding elsewhere than on the left, and models
    that `SpeculativeDecoder` refuses or that are in training mode.
    """

    draft: Any = None
    drafter: str | Drafter = DecoderConfig.drafter
    num_draft_tokens: int | str = DecoderConfig.num_draft_tokens
    acceptance: str | Rule = DecoderConfig.acceptance
    max_batch_size: int = DecoderConfig.max_batch_size
    tokenizer: Any = None
    draft_tokenizer: Any = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        *,
        draft: Any = None,
        drafter: str | Drafter | None = None,
        num_draft_tokens: int | str | None = None,
        acceptance: str | Rule | None = None,
        max_batch_size: int | None = None,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        stop_strings: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate`, which passes on those of its own arguments that are named here.

        input_ids: [B, n], repeated for num_return_sequences already. Returns [B, longest] or the output object.
        """
        from_caller = NotPassedOn.from_frame(model)
        if from_caller.synced_gpus:
            raise UsageError("synced_gpus=True; allowed: None or False")
        call_settings = {
            "draft": _one_of("draft", draft, "assistant_model", from_caller.assistant_model),
            "drafter": drafter,
            "num_draft_tokens": num_draft_tokens,
            "acceptance": acceptance,
            "max_batch_size": max_batch_size,
            "tokenizer": from_caller.tokenizer if tokenizer is None else tokenizer,
            "draft_tokenizer": _one_of(
                "draft_tokenizer", draft_tokenizer, "assistant_tokenizer", from_caller.assistant_tokenizer
            ),
        }
        settings = replace(self, **{name: value for name, value in call_settings.items() if value is not None})
        if settings.draft is None and call_settings["draft_tokenizer"] is not None:
            raise UsageError("draft_tokenizer (assistant_tokenizer) without a draft model; allowed: with draft=...")
        refuse_row_hooks(model)
        cached = settings.decoder_of(model)
        decoder = cached.using(
            settings.drafter, num_draft_tokens=settings.num_draft_tokens, acceptance=settings.acceptance
        )
        criteria = [*stopping_criteria, *settings.stop_criteria(stop_strings)]
        refuse_options(generation_config, logits_processor, criteria)
        warn_of_unread_options(generation_config)
        prompts = read_prompts(model, input_ids, model_kwargs)
        if from_caller.streamer is not None and len(prompts) > 1:
            raise UsageError(f"streamer with {len(prompts)} rows; allowed: one row")
        options = Options.read(generation_config, logits_processor, criteria, len(prompts))
        try:
            rows = _decode(decoder, options, prompts, from_caller.streamer)
            continuations = {} if options.pads else _run_on(decoder, options, prompts, rows)
            results = [decoder.result(row) for row in rows]
        finally:
            cached.forget()  # the model may learn before the next call, and rows hold the caller's processors
        if from_caller.streamer is not None:
            from_caller.streamer.end()
        sequences = _sequences(input_ids, rows, continuations, options.pad_id)
        if not generation_config.return_dict_in_generate:
            return sequences
        output = GenerateDecoderOnlyOutput(sequences=sequences)
        rounds = [round for row in [*rows, *continuations.values()] for round in row.rounds]
        output.slipstream_stats = Stats.of(rounds, lossless=decoder.lossless)
        output.slipstream_results = results
        return output

    def decoder_of(self, model: Any) -> SpeculativeDecoder:
        """The decoder over the model and the draft model, cached on the model."""
        for module in (model, self.draft):
            if isinstance(module, torch.nn.Module) and unwrapped(module).training:
                raise UsageError(f"model {type(module).__name__} is in training mode; allowed: after model.eval()")
        # without a draft model its tokenizer has no use; a call may still bring the model
        draft_tokenizer = None if self.draft is None else self.draft_tokenizer
        settings = DecoderSettings(draft=self.draft, tokenizer=self.tokenizer, draft_tokenizer=draft_tokenizer)
        return decoder_for(model, replace(settings, max_batch_size=self.max_batch_size))

    def stop_criteria(self, stop_strings: Any) -> list[Any]:
        """The criteria with which `generate` watches for stop strings."""
        if stop_strings is None:
            return []
        if self.tokenizer is None:
            raise UsageError(
                f"stop_strings={stop_strings!r} without a tokenizer; allowed: with tokenizer=..., or "
                "custom_generate=slipstream.CustomGenerate(tokenizer=...)"
            )
        return [StopStringCriteria(self.tokenizer, stop_strings)]


def _one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    if value is not None and other is not None:
        raise UsageError(f"{name} and {other_name} are both given; allowed: one of them")
    return other if value is None else value


def _decode(decoder: SpeculativeDecoder, options: Options, prompts: Sequence[PaddedPrompt], streamer: Any) -> list[Row]:
    room = decoder.target.backend.max_length
    for prompt in prompts:
        longest = room + prompt.padding.shape[1]
        if options.max_length > longest:
            raise UsageError(f"max_length={options.max_length}; allowed: at most {longest} (the model's context)")
    # like `generate`, take random numbers for sampling only
    seeds = torch.randint(1 << 62, (len(prompts),)).tolist() if options.do_sample else [0] * len(prompts)
    params = [options.params(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    rows = decoder.rows([prompt.tokens for prompt in prompts], params)
    for row, prompt in zip(rows, prompts, strict=True):
        row.end_ids, row.find_stop = options.end_ids, options.watch(prompt)
    if streamer is None:
        decoder.decode_rows(rows)
    else:
        for round in decoder.run(rows):
            for token in round.tokens:
                streamer.put(torch.tensor([token], device="cpu"))
    for row in rows:
        if row.error is not None:
            raise row.error
    return rows


def _run_on(
    decoder: SpeculativeDecoder, options: Options, prompts: Sequence[PaddedPrompt], rows: Sequence[Row]
) -> dict[int, Row]:
    """Continuations of the rows that stopped before the last one, up to its length."""
    longest = max(row.num_output_tokens for row in rows)
    short = [i for i, row in enumerate(rows) if row.num_output_tokens < longest]
    limit = replace(options, criteria=(), max_length=prompts[0].width + longest)
    continued = _decode(decoder, limit, [replace(prompts[i], tokens=rows[i].tokens) for i in short], None)
    return dict(zip(short, continued, strict=True))


def _sequences(input_ids: Tensor, rows: Sequence[Row], continuations: dict[int, Row], pad_id: int | None) -> Tensor:
    """[B, longest] the unchanged input, the output, and padding."""
    longest = max(row.num_output_tokens for row in rows)
    outputs: list[list[int | None]] = []
    for i, row in enumerate(rows):
        output = row.output + (continuations[i].output if i in continuations else [])
        outputs.append([*output, *[pad_id] * (longest - len(output))])
    return torch.cat([input_ids, input_ids.new_tensor(outputs)], dim=1)


custom_generate = CustomGenerate()
