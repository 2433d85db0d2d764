"""llama.cpp's own greedy generation on the same prompts and the same file: plain, and with prompt lookup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any

import numpy as np

from slipstream.bench.arms import LLAMA_LOOKUP, OF_LLAMA_CPP
from slipstream.bench.llama_cpp_model import LlamaCppModel, bindings, gguf_file
from slipstream.bench.records import Arm
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

SUPPORTED = {"max_tokens", "stop_token_ids", "ignore_eos", "seed"}
NGRAM = 2  # tokens that prompt lookup compares, the binding's default

Drafts = Callable[[list[int]], list[int]]


@dataclass
class Parts:
    """Seconds of reading prompts, of drafting and of the forwards that verify. forwards: a prompt counts as one."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    forwards: int = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what the block takes to one of them."""
        started = perf_counter()
        yield
        setattr(self, name, getattr(self, name) + perf_counter() - started)

    @property
    def seconds(self) -> dict[str, float]:
        """As a run's record has them."""
        return {"prefill": self.prefill, "draft": self.draft, "verify": self.verify}


@dataclass(frozen=True)
class LlamaBaseline:
    """One arm of llama.cpp. model: shared by all of them; end_ids: the target's, as our own arms take them."""

    arm: Arm
    model: LlamaCppModel
    end_ids: tuple[int, ...]
    _drafts: Drafts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_drafts", _drafts_of(self.arm))

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> tuple[list[list[int]], Parts]:
        """The new token ids of each prompt, its end token included, and where the time went."""
        parts = Parts()
        return [self._one(prompt, given, parts) for prompt, given in zip(prompts, params, strict=True)], parts

    def _one(self, prompt: list[int], params: SamplingParams, parts: Parts) -> list[int]:
        ends = {*(() if params.ignore_eos else self.end_ids), *params.stop_token_ids}
        self.model.reserve(len(prompt) + params.max_tokens)
        with parts.timed("prefill"):
            parts.forwards += 1
            tokens = [*prompt, int(self.model.read(prompt).argmax())]
        most = len(prompt) + params.max_tokens
        while len(tokens) < most and tokens[-1] not in ends:
            with parts.timed("draft"):
                draft = self._drafts(tokens)[: most - len(tokens) - 1]
            with parts.timed("verify"):
                choices = self.model.forward([tokens[-1], *draft], len(tokens) - 1).argmax(-1).tolist()
            parts.forwards += 1
            for chosen, drafted in zip(choices, [*draft, None], strict=True):
                tokens.append(chosen)
                if chosen != drafted or chosen in ends:
                    break
        return tokens[len(prompt) :]


def require_llama(arms: Sequence[Arm], target: str) -> None:
    """Raise where an arm of llama.cpp cannot run: another kind of target, or nothing installed."""
    for arm in arms:
        if arm.baseline in OF_LLAMA_CPP:
            gguf_file(target, f"arm {arm.name!r}")
            bindings(f"arm {arm.name!r}")


def check_params(arm: Arm, params: SamplingParams) -> None:
    """Refuse options that the arm does not apply: the arms would not do the same work."""
    for f in fields(SamplingParams):
        if f.name not in SUPPORTED and getattr(params, f.name) != getattr(SamplingParams(), f.name):
            allowed = ", ".join(sorted(SUPPORTED))
            value = getattr(params, f.name)
            raise UsageError(f"arm {arm.name!r}, which is greedy, with {f.name}={value!r}; allowed: {allowed}")


def _drafts_of(arm: Arm) -> Drafts:
    """What drafts: nothing, or the binding's own prompt lookup over the prompt and the text so far."""
    if arm.baseline != LLAMA_LOOKUP:
        return lambda tokens: []
    bindings(f"arm {arm.name!r}")
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    search: Any = LlamaPromptLookupDecoding(max_ngram_size=NGRAM, num_pred_tokens=arm.num_draft_tokens)
    return lambda tokens: search(np.array(tokens, dtype=np.intc)).tolist()
