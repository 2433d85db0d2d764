"""`SpeculativeDecoder`: loads models, turns prompts into rows and rounds into results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from slipstream import drafters
from slipstream.config import DecoderConfig
from slipstream.core.acceptance import Rule, load_rule
from slipstream.core.interfaces import Drafter, Learner
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.types import Row
from slipstream.draft_length.row_worth import awaited_together
from slipstream.errors import UsageError
from slipstream.models.generation_settings import warn_of_unread_settings
from slipstream.sampling.params import SamplingParams
from slipstream.text.requests import Message, Prompt, RequestReader, read_prompts
from slipstream.text.results import Chunk, Result, chunks_of, result_of
from slipstream.wiring.engine_choice import check_names, choose_engine, name_of
from slipstream.wiring.model_holder import ModelHolder
from slipstream.wiring.model_pair import ModelPair
from slipstream.wiring.run_order import ordered

if TYPE_CHECKING:
    from slipstream.jobs.batch_job import JobReport

log = logging.getLogger("slipstream")


class SpeculativeDecoder(ModelHolder):
    """Generates exactly what `target` would, faster.

    target, draft: a hub id, a local folder, a .gguf file, "smollm2", "toy" or a loaded `PreTrainedModel`.
    tokenizer: needed only with loaded models and text prompts; draft_tokenizer: a draft model's, if another.
    The other arguments are the fields of `DecoderConfig`, where their meaning and defaults are written down.
    Several threads may use one decoder, or several over the same models: they take turns, `generate` for a whole call
    and streams round by round. A decoder belongs to the process that made it.
    """

    KEPT = ("config", "rule", "_name")
    TOLD_BY_GENERATE = False  # whether each call brings what the model's generation_config says

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        *,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        drafter: str | Drafter = DecoderConfig.drafter,
        num_draft_tokens: int | str = DecoderConfig.num_draft_tokens,
        acceptance: str = DecoderConfig.acceptance,
        dtype: str = DecoderConfig.dtype,
        draft_dtype: str = DecoderConfig.draft_dtype,
        activations: str = DecoderConfig.activations,
        quantize: str = DecoderConfig.quantize,
        draft_vocabulary: int | str = DecoderConfig.draft_vocabulary,
        draft_context: int | str = DecoderConfig.draft_context,
        device: str = DecoderConfig.device,
        fast: bool | str = DecoderConfig.fast,
        reproducible: bool | str = DecoderConfig.reproducible,
        max_batch_size: int = DecoderConfig.max_batch_size,
        load_options: dict[str, Any] | None = None,
    ) -> None:
        self.config = DecoderConfig(
            drafter=name_of(drafter),
            num_draft_tokens=num_draft_tokens,
            acceptance=acceptance,
            dtype=dtype,
            draft_dtype=draft_dtype,
            activations=activations,
            quantize=quantize,
            draft_vocabulary=draft_vocabulary,
            draft_context=draft_context,
            device=device,
            fast=fast,
            reproducible=reproducible,
            max_batch_size=max_batch_size,
            load_options=load_options or {},
        )
        check_names(self.config, drafter)
        self._drafter: str | Drafter = drafter
        self.rule: Rule | None = None  # an acceptance rule given as an object
        self._take(ModelPair.load(target, draft, self.config, tokenizer, draft_tokenizer))
        if not self.TOLD_BY_GENERATE:
            warn_of_unread_settings(self.target)
        with self._use:
            self._choose_engine()
        if draft is not None and isinstance(drafter, str) and not drafters.traits(self._name).needs_draft_model:
            log.warning("the draft model is loaded but not used: drafter=%r needs none", self._name)

    def _choose_engine(self) -> None:
        chosen = choose_engine(self._models, self.config, self._drafter, self.rule)
        self._engine, self._name, self.traits = chosen.engine, chosen.name, chosen.traits
        self.coupled = chosen.coupled  # every token is the target's own draw, so that a seed has one text
        self.reader, self._user = RequestReader(self.target, chosen.no_predictions), object()

    def renew(self) -> None:
        """See that the models are used as their owners have them now; every call that reads prompts begins so."""
        with self._use:
            models = self._models.current(self.config)
            if models is not self._models:
                self._take(models)
                self._choose_engine()

    @property
    def drafter_name(self) -> str:
        """The drafter in use, with "auto" resolved."""
        return self._name

    @property
    def drafter(self) -> Drafter:
        """The drafter in use."""
        return self._engine.drafter

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's distribution exactly."""
        automatic = self.rule is None and self.config.acceptance == "auto"
        return automatic or (self.rule or load_rule(self.config.acceptance)).lossless

    def using(
        self,
        drafter: str | Drafter | None = None,
        *,
        num_draft_tokens: int | str | None = None,
        acceptance: str | Rule | None = None,
        reproducible: bool | str | None = None,
    ) -> SpeculativeDecoder:
        """The same loaded models and memory under other settings; models are not loaded again."""
        with self._use:
            other = self._clone()
            other.config = replace(
                self.config,
                drafter=self.config.drafter if drafter is None else name_of(drafter),
                num_draft_tokens=self.config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
                acceptance=self.config.acceptance if acceptance is None else name_of(acceptance),
                reproducible=self.config.reproducible if reproducible is None else reproducible,
            )
            if reproducible is not None:
                other._take(self._models.with_shapes(other.config))
            other._drafter = self._drafter if drafter is None else drafter
            other.rule = acceptance if isinstance(acceptance, Rule) else None if acceptance else self.rule
            other._choose_engine()
            return other

    def with_draft(self, draft: Any, draft_tokenizer: Any = None) -> SpeculativeDecoder:
        """The same target and memory with another draft model, or none (None); drafter and length become "auto"."""
        with self._use:
            other = self._clone()
            other._take(self._models.with_draft(draft, self.config, draft_tokenizer))
        return other.using("auto", num_draft_tokens="auto")

    def __repr__(self) -> str:
        if self._closed:
            return f"{type(self).__name__}(closed)"
        draft = self.draft and self.draft.name
        length, rule = self.config.num_draft_tokens, self.rule.name if self.rule else self.config.acceptance
        settings = f"num_draft_tokens={length!r}, acceptance={rule!r}, reproducible={self.reproducible}"
        models = f"{type(self).__name__}({self.target.name!r}, {draft!r}, drafter={self.drafter_name!r}"
        return f"{models}, {settings}, device={str(self.target.backend.device)!r}{self.target.precision})"

    def scheduler(self) -> Scheduler:
        """A scheduler over this decoder's models: rows are added and cancelled while others are decoded.

        Several threads may use it, and the decoder beside it: each call of a scheduler has the models to itself.
        """
        return Scheduler(self._engine, self.config.max_batch_size, turn=self._turn)

    @overload
    def generate(
        self, prompt: str | list[int] | list[Message], params: SamplingParams | None = None, *, chat: bool = True
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: list[Any], params: SamplingParams | list[SamplingParams] | None = None, *, chat: bool = True
    ) -> list[Result]: ...
    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | list[SamplingParams] | None = None, *, chat: bool = True
    ) -> Any: ...  # an array's shape decides

    def generate(
        self, prompt: Any, params: SamplingParams | list[SamplingParams] | None = None, *, chat: bool = True
    ) -> Result | list[Result]:
        """Generate for one prompt (a `Result`) or a list of prompts (a list, in order).

        A row that fails (its own logits processor raises, no token is left to choose) ends alone: in a list its result
        has finish reason "error" and says why, a single prompt raises.
        A prompt is a text, token ids or a list of chat messages. A text goes through the chat template if the tokenizer
        has one, unless chat=False. Ids are a list, an array or tensor (2-D with several rows: several prompts), or what
        a tokenizer returns. params: one for all, or one per prompt; with n > 1 the other texts are in
        `Result.alternatives`.
        """
        prompts = read_prompts(prompt)
        with self._use:
            self.renew()
            groups = self.reader.sample_rows(prompts.items, params, chat=chat)
            texts = iter(self.decode([row for group in groups for row in group]))
        if prompts.single and groups[0][0].error is not None:
            raise groups[0][0].error
        results = [replace(next(texts), alternatives=[next(texts) for _ in group[1:]]) for group in groups]
        return results[0] if prompts.single else results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool = True) -> Iterator[Chunk]:
        """Generate for one prompt, a `Chunk` per round. Stopping the iteration early is allowed."""
        prompts = read_prompts(prompt)
        if not prompts.single:
            raise UsageError("prompt is a list of prompts; allowed: stream takes one prompt, generate takes a list")
        row = self.rows(prompts.items, params, chat=chat)[0]
        yield from self._in_turns(chunks_of(row, self.run([row]), self.tokenizer))

    def batch(self, source: Any, output: Any, params: SamplingParams | None = None, **options: Any) -> JobReport:
        """Answer a file of requests, or a list of dictionaries, into a file (docs/batch.md); called again, it goes on.

        params: of lines that bring none; options: `errors`, and `JobOptions`.
        """
        from slipstream.jobs.batch_job import run_batch

        self.renew()
        return run_batch(self, source, output, params, options)

    def rounds(self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True) -> Iterator[Round]:
        """The facts as they come, over a list of prompts; `Round.row` is the index of the prompt."""
        yield from self.run(self.rows(prompts, params, chat=chat))

    def forget_learned(self) -> None:
        """Drop what the drafter learned from earlier requests, as measurements do before each."""
        with self._use:
            if isinstance(self._engine.drafter, Learner):
                self._engine.drafter.forget()

    def next_logits(self, token_ids: list[int]) -> Tensor:
        """[V] logits of the target after these tokens, in the precision it works in."""
        with self._use:
            row = self.rows([token_ids], SamplingParams(max_tokens=1))[0]  # first: the models may be renewed
            return self._models.next_logits(row)

    def rows(self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True) -> list[Row]:
        """The rows `generate` would decode for these prompts; for callers that run them with `run`."""
        with self._use:
            self.renew()
            return self.reader.rows(list(prompts), params, chat=chat)

    def run(self, rows: Sequence[Row]) -> Iterator[Round]:
        """Decode rows, yielding the facts of every round; `result` makes a finished row a `Result`.

        Weights that are changed before the rows have ended raise `UsageError`: such a text would be no model's.
        """
        models = self._models
        num_writes = models.num_writes()
        for facts in self.scheduler().run(rows):
            yield facts
            if models.num_writes() != num_writes:
                raise UsageError("weights were changed while a text was being written; allowed: before or after it")

    def decode(self, rows: Sequence[Row]) -> list[Result]:
        """Decode rows to their ends, in the order that is fastest; other threads wait until all are finished."""
        with self._use, awaited_together(rows):
            waits = len(rows) > self.config.max_batch_size
            for _ in self.scheduler().run(ordered(rows, lambda row: row, self.shapes.reuse) if waits else rows):
                pass
            return [self.result(row) for row in rows]

    def result(self, row: Row) -> Result:
        """What a finished row became."""
        return result_of(row, self.tokenizer, lossless=self.lossless)
