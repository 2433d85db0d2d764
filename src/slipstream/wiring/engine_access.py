"""What programs use of a decoder besides its public methods: its rows, its schedulers, and facts about its engine."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from torch import Tensor

from slipstream.config import DecoderConfig
from slipstream.core.acceptance import Rule, load_rule
from slipstream.core.interfaces import Drafter
from slipstream.core.kv_slots import Shapes
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row, Traits
from slipstream.draft_length.planner import awaited_together
from slipstream.errors import UsageError
from slipstream.models.exclusive_use import ExclusiveUse
from slipstream.models.loaded import Loaded
from slipstream.reproducibility.calibration import Calibration
from slipstream.sampling.params import SamplingParams
from slipstream.text.requests import Prompt, RequestReader
from slipstream.text.results import Result, result_of
from slipstream.tokenization.tokenizer import PLAIN_CHAT, ChatForm, Tokenizer
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge
from slipstream.wiring.engine_choice import EngineChoice, choose_engine
from slipstream.wiring.model_pair import ModelPair
from slipstream.wiring.prompt_scores import PromptScores
from slipstream.wiring.run_order import ordered

T = TypeVar("T")


@dataclass(frozen=True)
class _OpenParts:
    """What an open decoder works with; closing drops it.

    use: the lock of the models. drafter: as the caller gave it. turn: identifies this decoder to the lock.
    async_rounds: the thread that computes the rounds of streams for `async for`; it starts with the first of them.
    """

    models: ModelPair
    use: ExclusiveUse
    drafter: str | Drafter
    chosen: EngineChoice
    reader: RequestReader
    turn: object = field(default_factory=object)
    async_rounds: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "slipstream"))


class EngineAccess:
    """An open decoder as the command line, the server and the benchmarks see it; scripts need none of these methods.

    `SpeculativeDecoder` inherits them. They may change from one version to the next.
    """

    config: DecoderConfig
    rule: Rule | None  # an acceptance rule given as an object
    _drafter_name: str
    _parts_if_open: _OpenParts | None

    @classmethod
    def _over(cls, models: ModelPair, config: DecoderConfig, drafter: str | Drafter, rule: Rule | None) -> Self:
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

    def renew(self) -> None:
        """Adopt what the models' owners have changed; every call that reads prompts begins with this."""
        with self._use:
            models = self._models.current(self.config)
            if models is not self._models:
                self._open(models, self.config, self._parts.drafter, self.rule)

    def scheduler(self) -> Scheduler:
        """A scheduler over this decoder's models: rows are added and cancelled while others are decoded.

        Several threads may use it, and the decoder beside it: each call of a scheduler has the models to itself.
        """
        return Scheduler(self._engine, self.config.max_batch_size, lock=lambda: self._use, turn=self._turn)

    def rows(
        self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True, form: ChatForm = PLAIN_CHAT
    ) -> list[Row]:
        """The rows `generate` would decode for these prompts; for callers that run them with `run`."""
        with self._use:
            self.renew()
            return self.reader.with_form(form).rows(list(prompts), params, chat=chat)

    def sample_rows(
        self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True, form: ChatForm = PLAIN_CHAT
    ) -> list[list[Row]]:
        """The rows of each prompt: as many as its `n`, each with a seed of its own."""
        with self._use:
            self.renew()
            return self.reader.with_form(form).sample_rows(list(prompts), params, chat=chat)

    def run(self, rows: Sequence[Row]) -> Generator[Round]:
        """Decode rows, yielding the facts of every round; `result` makes a finished row a `Result`.

        Raises `UsageError` if weights are changed before the rows have ended: no single model would have written them.
        """
        models = self._models
        num_writes = models.num_writes()
        for round in self.scheduler().run(rows):
            yield round
            if models.num_writes() != num_writes:
                raise UsageError("weights were changed while a text was being written; allowed: before or after it")

    def decode_rows(self, rows: Sequence[Row]) -> list[Result]:
        """Decode rows to their ends, in the order that is fastest; other threads wait until all are finished."""
        with self._use, awaited_together(rows):
            waits = len(rows) > self.config.max_batch_size  # else all rows begin at once, and the order does not matter
            for _ in self.scheduler().run(ordered(rows, lambda row: row, self.shapes.reuse) if waits else rows):
                pass
            return [self.result(row) for row in rows]

    def result(self, row: Row) -> Result:
        """The result of a finished row."""
        return result_of(row, self.tokenizer, lossless=self.lossless)

    def next_logits(self, token_ids: list[int]) -> Tensor:
        """[V] logits of the target after these tokens, in the precision it works in."""
        with self._use:
            row = self.rows([token_ids], SamplingParams(max_tokens=1))[0]  # first: the models may be renewed
            with self._turn():
                return self._models.next_logits(row)

    def score_prompt(self, scores: PromptScores | None, row: Row, count: int, budget: int) -> PromptScores:
        """Score about `budget` more tokens of a row's text. scores: what the call before returned; None at first.

        count: how many of the likeliest tokens to report besides each. Uses the slot after those of a full batch.
        """
        with self._turn():
            scores = scores or PromptScores(self._target_session, self.config.max_batch_size, row, count)
            scores.advance(budget)
            return scores

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
    def drafter(self) -> Drafter | None:
        """The drafter in use: the caller's object, or else the last source that is asked; None if nothing drafts."""
        given, sources = self._parts.drafter, self._engine.sources
        if not isinstance(given, str):
            return given
        return sources[-1].drafter if sources and not sources[-1].of_predictions else None

    @property
    def drafter_name(self) -> str:
        """The name of the drafter in use, with "auto" resolved; a closed decoder still has it."""
        return self._drafter_name

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
    def reader(self) -> RequestReader:
        """Makes rows of prompts."""
        return self._parts.reader

    @property
    def traits(self) -> Traits:
        """What the drafter in use declares about itself."""
        return self._parts.chosen.traits

    @property
    def coupled(self) -> bool:
        """Whether every token is the target's own draw, so that a seed has one text."""
        return self._parts.chosen.coupled

    @property
    def shapes(self) -> Shapes:
        """The forward shapes that the target keeps to."""
        return self._target_session.shapes

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the target's forward shapes, if there is one."""
        return self._models.calibration

    @property
    def bridge(self) -> VocabularyBridge | None:
        """Translates between the target's vocabulary and the draft model's, where these differ."""
        return None if self._models.bridged is None else self._models.bridged.bridge

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens the target has read so far, all requests together, without those reused from the cache."""
        return self._target_session.prefill_tokens

    def tokens_in_memory(self) -> tuple[int, int]:
        """How many tokens the KV caches hold in all their slots: the target's and the draft model's."""
        return self._models.tokens_in_memory()

    def num_cached_tokens(self, row: Row) -> int:
        """How many tokens of a row are in the target's KV cache already, if it begins now."""
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
        parts = self._parts
        with parts.use, parts.use.step_of(parts.turn) as changed:
            if changed:  # another decoder may have set its own since
                parts.models.set_attended_lengths()
            yield

    def _in_turns(self, items: Iterator[T]) -> Iterator[T]:
        """The items; the models are in exclusive use while one is computed, and free while the caller has it."""
        while True:
            with self._use:
                item = next(items, None)
            if item is None:
                return
            yield item
