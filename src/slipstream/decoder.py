"""`SpeculativeDecoder`: loads models, turns prompts into rows and rounds into results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, overload

from torch import Tensor

from slipstream import drafters
from slipstream.config import DecoderConfig
from slipstream.core.acceptance import Rule, load_rule
from slipstream.core.interfaces import Drafter, Learner
from slipstream.core.kv_slots import Shapes
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row, Traits
from slipstream.draft_length.planner import awaited_together
from slipstream.errors import UsageError
from slipstream.models.exclusive_use import ExclusiveUse
from slipstream.models.generation_settings import warn_of_unread_settings
from slipstream.models.loaded import Loaded
from slipstream.reproducibility.calibration import Calibration
from slipstream.sampling.params import SamplingParams
from slipstream.text.requests import Message, Prompt, RequestReader, read_prompts
from slipstream.text.results import Chunk, Result, chunks_of, result_of
from slipstream.tokenization.tokenizer import Tokenizer
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge
from slipstream.wiring.engine_choice import EngineChoice, check_names, choose_engine, name_of
from slipstream.wiring.model_pair import ModelPair
from slipstream.wiring.prompt_scores import PromptScores
from slipstream.wiring.run_order import ordered

if TYPE_CHECKING:
    from slipstream.jobs.batch_job import JobReport

log = logging.getLogger("slipstream")
T = TypeVar("T")


@dataclass(frozen=True)
class _OpenParts:
    """What an open decoder works with; closing drops it.

    use: the lock of the models. drafter: as the caller gave it. turn: by this the lock knows who had it last.
    """

    models: ModelPair
    use: ExclusiveUse
    drafter: str | Drafter
    chosen: EngineChoice
    reader: RequestReader
    turn: object = field(default_factory=object)


class SpeculativeDecoder:
    """Generates exactly what `target` would, faster.

    target, draft: a hub id, a local folder, a .gguf file, "smollm2", "toy" or a loaded `PreTrainedModel`.
    tokenizer: needed only with loaded models and text prompts; draft_tokenizer: a draft model's, if another.
    The other arguments are the fields of `DecoderConfig`, where their meaning and defaults are written down.
    Several threads may use one decoder, or several over the same models: they take turns, `generate` for a whole call
    and streams round by round. A decoder belongs to the process that made it.
    """

    WARNS_OF_UNREAD_SETTINGS = True  # of the model's generation_config
    config: DecoderConfig
    rule: Rule | None  # an acceptance rule given as an object
    _drafter_name: str
    _parts_if_open: _OpenParts | None

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
        config = DecoderConfig(
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
        check_names(config, drafter)
        models = ModelPair.load(target, draft, config, tokenizer, draft_tokenizer)
        if self.WARNS_OF_UNREAD_SETTINGS:
            warn_of_unread_settings(models.target)
        self._open(models, config, drafter, rule=None)
        if draft is not None and isinstance(drafter, str) and not drafters.traits(self._drafter_name).needs_draft_model:
            log.warning("the draft model is loaded but not used: drafter=%r needs none", self._drafter_name)

    @classmethod
    def _over(
        cls, models: ModelPair, config: DecoderConfig, drafter: str | Drafter, rule: Rule | None
    ) -> SpeculativeDecoder:
        """A decoder over models that are loaded."""
        decoder = cls.__new__(cls)
        decoder._open(models, config, drafter, rule)
        return decoder

    def _open(self, models: ModelPair, config: DecoderConfig, drafter: str | Drafter, rule: Rule | None) -> None:
        use = models.exclusive_use()
        with use:
            chosen = choose_engine(models, config, drafter, rule)
            reader = RequestReader(models.target, chosen.no_predictions)
        self.config, self.rule, self._drafter_name = config, rule, chosen.name
        self._parts_if_open = _OpenParts(models, use, drafter, chosen, reader)

    def __repr__(self) -> str:
        if self._parts_if_open is None:
            return f"{type(self).__name__}(closed)"
        draft = self.draft and self.draft.name
        length, rule = self.config.num_draft_tokens, self.rule.name if self.rule else self.config.acceptance
        settings = f"num_draft_tokens={length!r}, acceptance={rule!r}, reproducible={self.reproducible}"
        models = f"{type(self).__name__}({self.target.name!r}, {draft!r}, drafter={self.drafter_name!r}"
        return f"{models}, {settings}, device={str(self.target.backend.device)!r}{self.target.precision})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a SpeculativeDecoder holds loaded models and cannot be pickled or deep-copied; allowed: to pickle its "
            "arguments (the models' names and decoder.config) and make the decoder anew, or decoder.using() for "
            "another one over the same models"
        )

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
        """Generate for a list of prompts, a `Round` at a time; `Round.row` is the index of the prompt."""
        yield from self.run(self.rows(prompts, params, chat=chat))

    def using(
        self,
        drafter: str | Drafter | None = None,
        *,
        num_draft_tokens: int | str | None = None,
        acceptance: str | Rule | None = None,
        reproducible: bool | str | None = None,
    ) -> SpeculativeDecoder:
        """A decoder over the same loaded models and KV caches, with other settings."""
        with self._use:
            models, config = self._models, self.config
            drafter = self._parts.drafter if drafter is None else drafter
            config = replace(
                config,
                drafter=name_of(drafter),
                num_draft_tokens=config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
                acceptance=config.acceptance if acceptance is None else name_of(acceptance),
                reproducible=config.reproducible if reproducible is None else reproducible,
            )
            if reproducible is not None:
                models = models.with_shapes(config)
            rule = acceptance if isinstance(acceptance, Rule) else None if acceptance else self.rule
            return self._over(models, config, drafter, rule)

    def with_draft(self, draft: Any, draft_tokenizer: Any = None) -> SpeculativeDecoder:
        """A decoder with the same target and KV cache, and another draft model or none (None).

        Its drafter and draft length are "auto".
        """
        with self._use:
            models = self._models.with_draft(draft, self.config, draft_tokenizer)
            return self._over(models, replace(self.config, drafter="auto", num_draft_tokens="auto"), "auto", self.rule)

    def close(self) -> None:
        """Give back what this decoder holds; a decoder that is closed refuses every call.

        Decoders made from it by `using` and `with_draft` stay open: models and memory are freed with the last of them.
        A stream under way ends with an error at its next round. Closing twice is allowed.
        """
        parts = self._parts_if_open
        if parts is not None:
            with parts.use:  # waits for another thread's round
                self._parts_if_open = None

    def __enter__(self) -> Self:
        with self._use:  # refused once closed
            return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def renew(self) -> None:
        """Follow what the models' owners have changed since; every call that reads prompts begins so."""
        with self._use:
            models = self._models.current(self.config)
            if models is not self._models:
                self._open(models, self.config, self._parts.drafter, self.rule)

    def scheduler(self) -> Scheduler:
        """A scheduler over this decoder's models: rows are added and cancelled while others are decoded.

        Several threads may use it, and the decoder beside it: each call of a scheduler has the models to itself.
        """
        return Scheduler(self._engine, self.config.max_batch_size, turn=self._turn)

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
        for round in self.scheduler().run(rows):
            yield round
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
        """The result of a finished row."""
        return result_of(row, self.tokenizer, lossless=self.lossless)

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """The token ids a prompt stands for."""
        with self._use:  # tokenizers cannot encode in two threads at once
            return self.reader.encode(prompt, chat=chat)

    def next_logits(self, token_ids: list[int]) -> Tensor:
        """[V] logits of the target after these tokens, in the precision it works in."""
        with self._use:
            row = self.rows([token_ids], SamplingParams(max_tokens=1))[0]  # first: the models may be renewed
            return self._models.next_logits(row)

    def score_prompt(self, scores: PromptScores | None, row: Row, count: int, budget: int) -> PromptScores:
        """Score about `budget` more tokens of a row's text; `scores` is what the call before returned, at first None.

        count: how many of the likeliest tokens to report besides each. The slot behind those of a full batch is used.
        """
        with self._turn():
            scores = scores or PromptScores(self._target_session, self.config.max_batch_size, row, count)
            scores.advance(budget)
            return scores

    def forget(self) -> None:
        """Empty the KV caches, so that the next prompt is computed from its first token."""
        with self._use:
            self._models.forget()

    def forget_learned(self) -> None:
        """Drop what the drafter learned from earlier requests, as measurements do before each."""
        with self._use:
            if isinstance(self.drafter, Learner):
                self.drafter.forget()

    @property
    def target(self) -> Loaded:
        """The model that is decoded."""
        return self._models.target

    @property
    def draft(self) -> Loaded | None:
        """The draft model, if one is loaded."""
        return self._models.draft

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, if there is one."""
        return self.target.tokenizer

    @property
    def reader(self) -> RequestReader:
        """Makes rows of prompts."""
        return self._parts.reader

    @property
    def drafter(self) -> Drafter:
        """The drafter in use."""
        return self._engine.drafter

    @property
    def drafter_name(self) -> str:
        """The name of the drafter in use, with "auto" resolved; a closed decoder still has it."""
        return self._drafter_name

    @property
    def traits(self) -> Traits:
        """What the drafter in use declares about itself."""
        return self._parts.chosen.traits

    @property
    def coupled(self) -> bool:
        """Whether every token is the target's own draw, so that a seed has one text."""
        return self._parts.chosen.coupled

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's distribution exactly."""
        automatic = self.rule is None and self.config.acceptance == "auto"
        return automatic or (self.rule or load_rule(self.config.acceptance)).lossless

    @property
    def reproducible(self) -> bool:
        """Whether forwards keep to shapes that agree to the bit."""
        return bool(self.shapes.widths)

    @property
    def shapes(self) -> Shapes:
        """The forward shapes that the target keeps to."""
        return self._target_session.shapes

    @property
    def calibration(self) -> Calibration | None:
        """What was measured of the target's forward shapes."""
        return self._models.calibration

    @property
    def bridge(self) -> VocabularyBridge | None:
        """Translates between the target's vocabulary and the draft model's, where these differ."""
        return None if self._models.bridged is None else self._models.bridged.bridge

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens the target has read so far, all requests together; reused memory is not read again."""
        return self._target_session.prefill_tokens

    def tokens_in_memory(self) -> tuple[int, int]:
        """How many tokens the KV caches hold in all their slots: the target's and the draft model's."""
        return self._models.tokens_in_memory()

    def num_cached_tokens(self, row: Row) -> int:
        """How many tokens of a row that begins now the target's KV cache has already."""
        with self._use:
            table = self._target_session.table
            return max((table.reusable_prefix(slot, row) for slot in range(len(table.states))), default=0)

    @property
    def _parts(self) -> _OpenParts:
        if self._parts_if_open is None:
            raise UsageError("this decoder is closed; allowed: one that is open (make another SpeculativeDecoder)")
        return self._parts_if_open

    @property
    def _models(self) -> ModelPair:
        return self._parts.models

    @property
    def _target_session(self) -> Session:
        return self._models.target_session

    @property
    def _engine(self) -> Engine:
        return self._parts.chosen.engine

    @property
    def _use(self) -> ExclusiveUse:
        return self._parts.use

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclusive use of the models, with the attended lengths of this decoder."""
        with self._use:
            if self._use.changes_to(self._parts.turn):  # another decoder may have set its own since
                self._models.set_attended_lengths()
            yield

    def _in_turns(self, items: Iterator[T]) -> Iterator[T]:
        """The items; the models are in exclusive use while one is computed, and free while the caller has it."""
        while True:
            with self._use:
                item = next(items, None)
            if item is None:
                return
            yield item
