"""Transformers' own generation on the same prompts and weights: plain, with an assistant model, with prompt lookup."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from slipstream.bench.arms import ASSISTED, LOOKUP, TUNED, Arm
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

# options that are passed to `generate`; others mean something else there, or nothing
SUPPORTED = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "max_tokens"}
SUPPORTED |= {"stop_token_ids", "ignore_eos", "seed"}


@dataclass(frozen=True)
class Baseline:
    """One arm of transformers."""

    arm: Arm
    model: Any  # plain transformers object, shared with our own unpacked arms, as is `assistant`
    assistant: Any
    end_ids: tuple[int, ...]
    max_batch_size: int = 8  # more prompts are decoded one batch after the other

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> tuple[list[list[int]], int]:
        """The new token ids of each prompt, its end token included, and the number of forwards of the target.

        Several prompts are padded on the left. params: one per prompt, which differ only in the seed; the first seed of
        a batch counts.
        """
        texts: list[list[int]] = []
        forwards = 0
        for start in range(0, len(prompts), self.max_batch_size):
            batch = slice(start, start + self.max_batch_size)
            batch_texts, batch_forwards = self._batch(prompts[batch], params[batch])
            texts, forwards = texts + batch_texts, forwards + batch_forwards
        return texts, forwards

    def _batch(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> tuple[list[list[int]], int]:
        options = params[0]
        ends = [*(() if options.ignore_eos else self.end_ids), *options.stop_token_ids]
        ids, mask = self._padded(prompts)
        with (
            torch.random.fork_rng(enabled=options.temperature > 0),
            assistant_settings(self.arm, self.assistant),
            forwards_of(self.model) as forwards,
        ):
            if options.temperature > 0:
                torch.manual_seed(options.seed or 0)
            out: Tensor = self.model.generate(ids, attention_mask=mask, **self._options(options, ends))
        return [_cut(tokens, ends) for tokens in out[:, ids.shape[1] :].tolist()], len(forwards)

    def _padded(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, prompts))
        pads = [width - len(tokens) for tokens in prompts]
        ids = [[0] * pad + tokens for pad, tokens in zip(pads, prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        return torch.tensor(ids, device=self.model.device), torch.tensor(mask, device=self.model.device)

    def _options(self, params: SamplingParams, ends: list[int]) -> dict[str, Any]:
        """All options, set explicitly so that none of the model's own defaults applies."""
        sampled = params.temperature > 0
        options: dict[str, Any] = {
            "do_sample": sampled,
            "temperature": params.temperature if sampled else None,
            "top_k": params.top_k if sampled else None,
            "top_p": params.top_p if sampled else None,
            "min_p": (params.min_p or None) if sampled else None,
            "max_new_tokens": params.max_tokens,
            "min_new_tokens": params.min_tokens or None,
            "repetition_penalty": params.repetition_penalty,
            "eos_token_id": ends or None,
            "pad_token_id": ends[0] if ends else 0,
        }
        if self.arm.baseline in (ASSISTED, TUNED):
            options["assistant_model"] = self.assistant
        if self.arm.baseline == LOOKUP:
            options["prompt_lookup_num_tokens"] = self.arm.num_draft_tokens
        return options


@contextmanager
def forwards_of(model: Any) -> Iterator[list[None]]:
    """A list that grows by one entry with every forward of the model."""
    seen: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: seen.append(None))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def assistant_settings(arm: Arm, assistant: Any) -> Iterator[None]:
    """The assistant's generation settings for one call.

    Transformers reads the draft length from the assistant's `generation_config` (given to `generate` it is ignored)
    and may store adapted values there; the old settings are restored, so that no run depends on earlier ones.
    """
    if assistant is None:
        yield
        return
    before = assistant.generation_config
    assistant.generation_config = copy.deepcopy(before)
    if arm.baseline == TUNED:
        assistant.generation_config.num_assistant_tokens = arm.num_draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        assistant.generation_config = before


def check_params(arm: str, params: SamplingParams, supported: Collection[str] = SUPPORTED) -> None:
    """Refuse options that an arm does not apply, as arms must do the same work. arm: its name, for messages."""
    for f in fields(SamplingParams):
        if f.name not in supported and getattr(params, f.name) != getattr(SamplingParams(), f.name):
            allowed = ", ".join(sorted(supported))
            raise UsageError(f"arm {arm} with {f.name}={getattr(params, f.name)!r}; allowed: {allowed}")


def no_hf_model(arm: Arm, target: str) -> UsageError:
    """The error for an arm that needs a Hugging Face model, when the target is not one."""
    return UsageError(f"arm {arm.name!r} needs a Hugging Face model; target {target!r} is not one")


def _cut(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to and including the first end token; padding follows."""
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    return tokens if end is None else tokens[: end + 1]
