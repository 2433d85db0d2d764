"""The arms ready to run: decoders and baselines over models that are loaded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from slipstream.bench import llama_baseline
from slipstream.bench.arms import ASSISTED, OF_LLAMA_CPP, PLAIN, TUNED
from slipstream.bench.baselines import Baseline, check_params, no_hf_model, plain_model
from slipstream.bench.llama_baseline import LlamaBaseline
from slipstream.bench.llama_cpp_model import LlamaCppModel, gguf_file
from slipstream.bench.plan import BenchPrompt
from slipstream.bench.records import Arm
from slipstream.certificate.parity import coupled
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.loaded import LoadOptions
from slipstream.sampling.params import SamplingParams
from slipstream.text.results import Result
from slipstream.text.stats import Stats


@dataclass(frozen=True)
class Output:
    """What an arm made of a group of prompts: token ids per prompt, and how.

    results: one per prompt, of our own arms; num_forwards: of the target, of baselines; parts: see `Run`.
    """

    texts: list[list[int]]
    results: list[Result] | None = None
    num_forwards: int | None = None
    parts: dict[str, float] | None = None

    @property
    def rounds(self) -> list[Round] | None:
        """Of all prompts, one prompt after the other."""
        return None if self.results is None else [done for result in self.results for done in result.rounds]

    @property
    def stats(self) -> Stats | None:
        """Of all prompts together."""
        if self.results is None or self.rounds is None:
            return None
        return Stats.of(self.rounds, lossless=all(result.stats.lossless for result in self.results))


class Lineup:
    """Every arm over the same models.

    Baselines and arms on plain weights share one transformers object per model; arms on packed weights share another.
    Where nothing is packed all arms share one object. An arm that cannot exist is refused here.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, arms: Sequence[Arm], params: SamplingParams, *, chat: bool = True
    ) -> None:
        self.decoder, self.arms, self.params, self.chat = decoder, list(arms), params, chat
        self.decoders = {arm.name: self._decoder(arm) for arm in arms if arm.baseline is None}
        llama = [arm for arm in arms if arm.baseline in OF_LLAMA_CPP]
        self._llama = {arm.name: self._llama_baseline(arm) for arm in llama}
        self._baselines = {
            arm.name: self._baseline(arm) for arm in arms if arm.baseline is not None and arm not in llama
        }
        self.alone = decoder.using(PLAIN)

    @cached_property
    def plain(self) -> SpeculativeDecoder:
        """The same models on weights as transformers loads them."""
        decoder, config = self.decoder, self.decoder.config
        if not any(loaded is not None and loaded.packed for loaded in (decoder.target, decoder.draft)):
            return decoder
        target, draft = self._plain_models
        same = {name: getattr(config, name) for name in ("num_draft_tokens", "acceptance", "reproducible")}
        return SpeculativeDecoder(target, draft, fast=False, max_batch_size=config.max_batch_size, **same)

    @cached_property
    def _plain_models(self) -> tuple[Any, Any]:
        """Target and draft model as transformers loads them, the draft model None where there is none."""
        decoder, config = self.decoder, self.decoder.config
        options = LoadOptions(config.dtype, config.device, False, config.load_options)
        draft = None if decoder.draft is None else plain_model(decoder.draft, options.for_draft(config.dtype))
        return plain_model(decoder.target, options), draft

    @cached_property
    def _llama_model(self) -> LlamaCppModel:
        """The target's file in llama.cpp, with as many threads as our own forwards have."""
        what = next(f"arm {arm.name!r}" for arm in self.arms if arm.baseline in OF_LLAMA_CPP)
        return LlamaCppModel(gguf_file(self.decoder.target.name, what), torch.get_num_threads(), what)

    def encode(self, prompt: BenchPrompt) -> list[int]:
        """The token ids of a prompt, the same for every arm."""
        return self.decoder.encode(prompt.text, chat=self.chat)

    def params_of(self, arm: Arm, prompt: BenchPrompt) -> SamplingParams:
        """The options of a prompt: its own seed, the arm's temperature, and a prediction if the arm is given them."""
        prediction = (prompt.prediction or self.params.prediction) if arm.predicted else None
        seed, temperature = (self.params.seed or 0) + prompt.index, self.temperature(arm.name)
        return replace(self.params, temperature=temperature, seed=seed, prediction=prediction)

    def temperature(self, name: str) -> float:
        """The arm's own, else the run's."""
        own = next(arm.temperature for arm in self.arms if arm.name == name)
        return self.params.temperature if own is None else own

    def generate(self, arm: Arm, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Output:
        """Run an arm; this is what is timed."""
        if arm.name in self._llama:
            texts, parts = self._llama[arm.name].generate(prompts, params)
            return Output(texts, num_forwards=parts.forwards, parts=parts.seconds)
        if arm.baseline is not None:
            texts, forwards = self._baselines[arm.name].generate(prompts, params)
            return Output(texts, num_forwards=forwards)
        decoder = self.decoders[arm.name]
        results = decoder.generate([list(tokens) for tokens in prompts], list(params))
        return Output([result.token_ids for result in results], results)

    def forget(self, arm: Arm) -> None:
        """Empty the arm's KV cache and drop what its drafter learned, so that its next prompt starts from nothing."""
        if arm.baseline is None:
            self.decoders[arm.name].forget()
            self.decoders[arm.name].forget_learned()

    def plain_text(self, prompt: BenchPrompt, params: SamplingParams) -> list[int]:
        """Plain decoding's text of one prompt, untimed."""
        self.alone.forget()
        return self.alone.generate(self.encode(prompt), replace(params, prediction=None)).token_ids

    def coupled(self, arm: Arm, params: SamplingParams) -> bool:
        """Whether the arm's text must be plain decoding's: greedy, or every token the target's own draw."""
        if params.temperature == 0:
            return True
        if arm.baseline is not None:
            return False
        return coupled(self.decoders[arm.name], params)

    def same_bits(self, arm: Arm) -> bool:
        """Whether no rounding can tell the arm's text from plain decoding's: one copy, in shapes that agree."""
        if arm.baseline is not None or self.decoders[arm.name].target is not self.decoder.target:
            return False
        return self.decoder.reproducible or self.decoder.target.model is None

    def _decoder(self, arm: Arm) -> SpeculativeDecoder:
        base = self.plain if arm.fast is False else self.decoder
        return base.using(arm.drafter, num_draft_tokens=arm.num_draft_tokens, acceptance=arm.acceptance)

    def _llama_baseline(self, arm: Arm) -> LlamaBaseline:
        llama_baseline.check_params(arm, replace(self.params, temperature=self.temperature(arm.name), prediction=None))
        return LlamaBaseline(arm, self._llama_model, self.decoder.target.end_ids)

    def _baseline(self, arm: Arm) -> Baseline:
        check_params(arm, replace(self.params, prediction=None))
        loaded = self.decoder.target
        if loaded.model is None:
            raise no_hf_model(arm, loaded.name)
        assisted = arm.baseline in (ASSISTED, TUNED)
        if assisted and self.decoder.draft is None:
            raise UsageError(f"arm {arm.name!r} needs a draft model; give draft=... (command line: --draft)")
        target, draft = self._plain_models
        return Baseline(arm, target, draft if assisted else None, loaded.end_ids, self.decoder.config.max_batch_size)
