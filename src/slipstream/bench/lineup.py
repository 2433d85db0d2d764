"""The arms ready to run, over models that are loaded once; timed runs; and a verdict on every output.

Every arm is warmed up, starts from an empty KV cache and waits until the device is idle. `Runner` works through a plan:
each measurement is timed, judged and saved before the next begins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from slipstream.bench import llama_cpp
from slipstream.bench.arms import ASSISTED, OF_LLAMA_CPP, PLAIN, TUNED, Arm
from slipstream.bench.baselines import Baseline, check_params, no_hf_model
from slipstream.bench.llama_cpp import LlamaBaseline, LlamaCppModel, gguf_file
from slipstream.bench.plan import BenchPrompt, Group, Measurement
from slipstream.bench.records import Run, VerdictName, append, compact, finished
from slipstream.certificate.parity import Difference, TieJudge, plain_difference, plain_model
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError, with_class
from slipstream.models.heads.features import FeatureReader
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.paused_collection import paused_collection
from slipstream.reproducibility.timing import wait_for_device
from slipstream.sampling.params import SamplingParams
from slipstream.text.results import Result, Stats

WARM_UP_TOKENS = 8

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Output:
    """The outputs of an arm for a group of prompts."""

    texts: list[list[int]]  # token ids per prompt
    results: list[Result] | None = None  # one per prompt, for our own arms
    num_forwards: int | None = None  # of the target, for baselines
    parts: dict[str, float] | None = None  # see `Run`

    @property
    def rounds(self) -> list[Round] | None:
        """The rounds of all prompts, one prompt after the other."""
        return None if self.results is None else [decoded for result in self.results for decoded in result.rounds]

    @property
    def stats(self) -> Stats | None:
        if self.results is None or self.rounds is None:
            return None
        return Stats.of(self.rounds, lossless=all(result.stats.lossless for result in self.results))


class Lineup:
    """Every arm over the same models.

    Baselines and arms on plain weights share one transformers object per model; arms on packed weights share another.
    If nothing is packed, all arms share one object. An arm that cannot exist is refused here. Options that are left out
    are not the model's own, so that all arms decode alike.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, arms: Sequence[Arm], params: SamplingParams, *, chat: bool = True
    ) -> None:
        self.decoder, self.arms, self.params, self.chat = decoder, list(arms), params.explicit, chat
        self.decoders: dict[str, SpeculativeDecoder] = {}
        self._llama: dict[str, LlamaBaseline] = {}
        self._baselines: dict[str, Baseline] = {}
        for arm in arms:
            if arm.baseline is None:
                base = self.plain if arm.fast is False else decoder
                self.decoders[arm.name] = base.using(
                    arm.drafter, num_draft_tokens=arm.num_draft_tokens, acceptance=arm.acceptance
                )
            elif arm.baseline in OF_LLAMA_CPP:
                self._llama[arm.name] = self._llama_baseline(arm)
            else:
                self._baselines[arm.name] = self._baseline(arm)
        self.alone = decoder.using(PLAIN)

    @cached_property
    def plain(self) -> SpeculativeDecoder:
        """A decoder over the same models, with weights as transformers loads them."""
        decoder, config = self.decoder, self.decoder.config
        if not any(loaded is not None and loaded.packed for loaded in (decoder.target, self._draft_model)):
            return decoder
        target, draft = self._plain_models
        same = {name: getattr(config, name) for name in ("num_draft_tokens", "acceptance", "reproducible")}
        return SpeculativeDecoder(target, draft, fast=False, max_batch_size=config.max_batch_size, **same)

    @cached_property
    def _plain_models(self) -> tuple[Any, Any]:
        """Target and draft model as transformers loads them, the draft model None if there is none."""
        decoder, config = self.decoder, self.decoder.config
        options = LoadOptions(config.dtype, config.device, False, config.load_options)
        draft = self._draft_model and plain_model(self._draft_model, options.for_draft(config.dtype))
        return plain_model(decoder.target, options), draft

    @property
    def _draft_model(self) -> Loaded | None:
        """The draft model; None if there is none, or if it is a draft head, which transformers does not run."""
        draft = self.decoder.draft
        return None if draft is None or isinstance(draft.backend, FeatureReader) else draft

    @cached_property
    def _llama_model(self) -> LlamaCppModel:
        """The target's file in llama.cpp, with as many threads as our own forwards use."""
        what = next(f"arm {arm.name!r}" for arm in self.arms if arm.baseline in OF_LLAMA_CPP)
        return LlamaCppModel(
            gguf_file(self.decoder.target.source or self.decoder.target.name, what), torch.get_num_threads(), what
        )

    def encode(self, prompt: BenchPrompt) -> list[int]:
        """The token ids of a prompt, the same for every arm."""
        return self.decoder.encode(prompt.text, chat=self.chat)

    def params_of(self, arm: Arm, prompt: BenchPrompt) -> SamplingParams:
        """The options of a prompt: its own seed, the arm's temperature, and its prediction if the arm uses them."""
        prediction = (prompt.prediction or self.params.prediction) if arm.predicted else None
        seed = (self.params.seed or 0) + prompt.index
        temperature = self.temperature(arm.name)
        return replace(self.params, temperature=temperature, seed=seed, prediction=prediction)

    def temperature(self, name: str) -> float:
        """The arm's own temperature, else the run's."""
        arm_temperature = next(arm.temperature for arm in self.arms if arm.name == name)
        return self.params.temperature if arm_temperature is None else arm_temperature

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
        """The output of plain decoding for one prompt, untimed."""
        self.alone.forget()
        return self.alone.generate(self.encode(prompt), replace(params, prediction=None)).token_ids

    def coupled(self, arm: Arm, params: SamplingParams) -> bool:
        """True if the arm's output must be plain decoding's: it is greedy, or every token is the target's own draw."""
        return params.temperature == 0 or (arm.baseline is None and self.decoders[arm.name].coupled)

    def same_bits(self, arm: Arm) -> bool:
        """True if rounding cannot change the arm's output: same weights, and forward shapes that agree."""
        if arm.baseline is not None or self.decoders[arm.name].target is not self.decoder.target:
            return False
        return self.decoder.reproducible or self.decoder.target.model is None

    def _llama_baseline(self, arm: Arm) -> LlamaBaseline:
        params = replace(self.params, temperature=self.temperature(arm.name), prediction=None)
        check_params(f"{arm.name!r}, which is greedy,", params, llama_cpp.SUPPORTED)
        return LlamaBaseline(arm, self._llama_model, self.decoder.target.end_ids)

    def _baseline(self, arm: Arm) -> Baseline:
        check_params(repr(arm.name), replace(self.params, prediction=None))
        loaded = self.decoder.target
        if loaded.model is None:
            raise no_hf_model(arm, loaded.name)
        assisted = arm.baseline in (ASSISTED, TUNED)
        if assisted and self._draft_model is None:
            raise UsageError(f"arm {arm.name!r} needs a draft model; give draft=... (command line: --draft)")
        target, draft = self._plain_models
        return Baseline(arm, target, draft if assisted else None, loaded.end_ids, self.decoder.config.max_batch_size)


@dataclass
class TimedRuns:
    """Runs the arms of a lineup and times them."""

    lineup: Lineup
    _warm: set[tuple[str, int]] = field(default_factory=set)

    def warm_up(self, arm: Arm, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        """Run an arm on whole prompts, untimed."""
        self.lineup.generate(arm, prompts, params)
        self._warm.add((arm.name, len(prompts)))

    def run(
        self, arm: Arm, prompts: list[list[int]], params: list[SamplingParams], batch: int = 1
    ) -> tuple[Output, float]:
        """Output of the arm for these prompts, and the seconds it took, prompt processing included.

        batch: number of prompts decoded together. Before its first run at a batch size, an arm generates a few untimed
        tokens.
        """
        if (arm.name, batch) not in self._warm:
            shortened = [
                replace(
                    options,
                    max_tokens=min(WARM_UP_TOKENS, options.max_tokens),
                    min_tokens=min(WARM_UP_TOKENS, options.min_tokens),
                )
                for options in params[:batch]
            ]
            self.lineup.generate(arm, prompts[:batch], shortened)
            self._warm.add((arm.name, batch))
        self.lineup.forget(arm)
        wait_for_device(self.lineup.decoder.target.backend.device)  # what is queued belongs to whatever ran before
        with paused_collection():  # a full collection takes a third of a second, which would count against one arm
            started = perf_counter()
            output = self.lineup.generate(arm, prompts, params)
            return output, perf_counter() - started


@dataclass
class Judge:
    """Compares outputs with plain decoding of each prompt alone: the first output of arm `none`, or an untimed one.

    Greedy outputs must be identical or differ first at a tie; so must sampled ones if every token is the target's own
    draw. Other sampled outputs are not compared.
    """

    lineup: Lineup
    _texts: dict[tuple[str, float], list[int]] = field(default_factory=dict)
    _judged: dict[tuple[str, str, tuple[int, ...]], Difference | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ties = TieJudge(self.lineup.decoder)

    def recall(self, runs: Iterable[Run]) -> None:
        """Take the reference outputs from earlier runs; failed runs have none."""
        for run in runs:
            if run.error is not None:
                continue
            for name, text, verdict in zip(run.prompts, run.texts, run.verdicts, strict=True):
                if verdict == "reference":
                    self._texts[name, self.lineup.temperature(run.arm)] = text

    def judge(self, arm: Arm, group: Group, texts: Sequence[list[int]]) -> list[VerdictName]:
        """One verdict per prompt of the group."""
        is_plain = arm.drafter == PLAIN and arm.fast is None and len(group.prompts) == 1
        return [self._verdict(arm, prompt, text, is_plain) for prompt, text in zip(group.prompts, texts, strict=True)]

    def difference(self, arm: Arm, prompt: BenchPrompt, expected: list[int], text: list[int]) -> Difference | None:
        """The first difference between an arm's output and the expected one, explained; None if they are equal."""
        difference = plain_difference(expected, text)
        params = self.lineup.params_of(arm, prompt)
        if difference is None or arm.baseline in OF_LLAMA_CPP:  # our rounding cannot explain llama.cpp's arithmetic
            return difference
        same_bits, coupled = self.lineup.same_bits(arm), self.lineup.coupled(arm, params)
        try:
            ids = self.lineup.encode(prompt)
            difference = self.ties.judge(ids, expected, text, params, coupled=coupled, same_bits=same_bits)
        except Exception as error:  # the full-precision model may not fit: then nothing shows that this is a tie
            log.warning("the first difference of %s on %s cannot be judged: %s", arm.name, prompt.id, error)
        return difference

    def _verdict(self, arm: Arm, prompt: BenchPrompt, text: list[int], is_plain: bool) -> VerdictName:
        params = self.lineup.params_of(arm, prompt)
        if not self.lineup.coupled(arm, params):
            return "not compared"
        key = prompt.id, params.temperature
        if key not in self._texts:
            if is_plain:
                self._texts[key] = text
                return "reference"
            try:
                self._texts[key] = self.lineup.plain_text(prompt, params)
            except Exception as error:  # whatever a model may raise: the speed stands, the output is unproven
                log.warning("plain decoding failed for %s: %s", prompt.id, error)
                return "not compared"
        judgment = arm.name, prompt.id, tuple(text)
        if judgment not in self._judged:
            self._judged[judgment] = self.difference(arm, prompt, self._texts[key], text)
        difference = self._judged[judgment]
        if difference is None:
            return "identical"
        if not difference.compared:
            return "not compared"
        return "tie" if difference.tie else "different"


@dataclass
class Runner:
    """Makes the missing measurements of a plan, in the plan's order."""

    lineup: Lineup
    plan: Sequence[Measurement]
    folder: Path | None  # None: the runs are not saved

    def __post_init__(self) -> None:
        self._timed = TimedRuns(self.lineup)

    def run(self, before: Sequence[Run]) -> Iterator[Run]:
        """Yield each run once it is saved. before: the runs in the folder; failed ones are not tried again."""
        judge = Judge(self.lineup)
        existing = finished(before)
        judge.recall(before)
        for measurement in self.plan:
            if measurement.key not in existing:
                run = self._measure(measurement, judge)
                if self.folder is not None:
                    append(self.folder, run)
                yield run

    def _measure(self, measurement: Measurement, judge: Judge) -> Run:
        empty = Run(
            measurement.arm.name, measurement.group.ids, measurement.group.family, measurement.batch, measurement.repeat
        )
        try:
            prompts = [self.lineup.encode(prompt) for prompt in measurement.group.prompts]
            params = [self.lineup.params_of(measurement.arm, prompt) for prompt in measurement.group.prompts]
            output, seconds = self._timed.run(measurement.arm, prompts, params, measurement.batch)
        except Exception as error:  # whatever a model or a drafter may raise: this run failed, the others go on
            return replace(empty, error=with_class(error))
        return replace(
            empty,
            seconds=seconds,
            num_output_tokens=sum(map(len, output.texts)),
            texts=output.texts,
            verdicts=judge.judge(measurement.arm, measurement.group, output.texts),
            stats=None if output.stats is None else output.stats.to_dict(),
            rounds=None if output.rounds is None else [compact(decoded) for decoded in output.rounds],
            num_forwards=output.num_forwards,
            parts=output.parts,
        )
