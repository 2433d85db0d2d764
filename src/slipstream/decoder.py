"""`SpeculativeDecoder`: loads models, turns prompts into rows and rounds into results."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack, overload

from torch import Tensor

from slipstream.checks import arguments_named, check_known, explained_fields
from slipstream.config import DecoderConfig
from slipstream.core.acceptance import Rule, load_rule
from slipstream.core.interfaces import Drafter, Learner, Source
from slipstream.core.kv_slots import Shapes
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row, Traits
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import awaited_together
from slipstream.errors import UsageError
from slipstream.models.exclusive_use import ExclusiveUse
from slipstream.models.generation_settings import ModelSettings, warn_without_ends
from slipstream.models.loaded import Loaded
from slipstream.reproducibility.calibration import Calibration
from slipstream.reproducibility.timing import TEXT, DraftTimes, time_drafts
from slipstream.sampling.params import SamplingParams, params_from
from slipstream.text.requests import (
    FormOptions,
    Ids,
    Message,
    Prompt,
    Prompts,
    RequestOptions,
    RequestReader,
    read_conversation,
    read_form,
    read_ids,
    read_prompts,
)
from slipstream.text.results import AsyncStream, Chunk, Result, Stream, chunks_of, result_of, with_parts
from slipstream.tokenization.tokenizer import PLAIN_CHAT, ChatForm, Tokenizer
from slipstream.wiring.engine_choice import EngineChoice, check_names, choose_engine, name_of
from slipstream.wiring.model_pair import ModelPair
from slipstream.wiring.prompt_scores import PromptScores
from slipstream.wiring.run_order import ordered

if TYPE_CHECKING:
    from slipstream.jobs.batch_job import JobReport

log = logging.getLogger("slipstream")

T = TypeVar("T")

LOADED_BY = ("trust_remote_code", "revision", "token", "subfolder", "cache_dir", "attn_implementation")
OTHER_NAMES = {  # of other libraries, and what to write here
    **{f.name: f"decoder.generate(prompt, {f.name}=...)" for f in fields(SamplingParams)},
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model", "drafter_model"), "draft=..."),
    **dict.fromkeys(("model", "target_model", "model_name", "model_path"), "target=..."),
    **dict.fromkeys(("assistant_tokenizer",), "draft_tokenizer=..."),
    "torch_dtype": "dtype='bfloat16'",
    **{name: f"load_options={{{name!r}: ...}}" for name in ("device_map", "quantization_config", *LOADED_BY)},
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), "quantize='int4' or 'int8'"),
    **dict.fromkeys(("gamma", "num_assistant_tokens", "num_speculative_tokens", "k"), "num_draft_tokens=..."),
    **dict.fromkeys(("max_num_seqs", "batch_size"), "max_batch_size=..."),
    "prompt_lookup_num_tokens": "drafter='ngram'",
}


@dataclass(frozen=True)
class _OpenParts:
    """The parts of an open decoder; closing drops them."""

    models: ModelPair
    use: ExclusiveUse  # the lock of the models
    drafter: str | Drafter  # as the caller gave it
    choice: EngineChoice
    engine: Engine
    reader: RequestReader
    turn: object = field(default_factory=object)  # identifies this decoder to the lock
    # computes the rounds of streams for `async for`; it starts with the first of them
    async_rounds: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "slipstream"))


class SpeculativeDecoder:
    """Generates exactly what `target` would, faster.

    target, draft: a short name such as "qwen3:4b", a hub id ("OWNER/REPO:Q4_K_M" for a GGUF file), a local folder, a
    .gguf file, "smollm2", "toy" or a loaded `PreTrainedModel`; draft may also name a draft head, or be "mtp" for the
    MTP layers in the target's checkpoint, or "none". By default "smollm2" drafts with a head of its own, a short name
    with its draft model, and other targets with their MTP layers if they have any.
    tokenizer: needed only with loaded models and text prompts; draft_tokenizer: a draft model's, if it has another.
    The other arguments are settings, listed below with their defaults.
    Several threads may use one decoder, or several over the same models: they take turns, `generate` for a whole call
    and streams round by round. A decoder belongs to the process that made it.
    The first decoder of a model on a machine measures how it runs there, which takes seconds to minutes; it says so on
    standard error, and `logging.getLogger("slipstream").setLevel(logging.WARNING)` silences that.
    """

    config: DecoderConfig
    rule: Rule | None  # an acceptance rule given as an object
    _drafter_name: str
    _parts_if_open: _OpenParts | None
    _reads_model_settings = True  # such as those of generation_config.json

    @arguments_named("SpeculativeDecoder", OTHER_NAMES)
    def __init__(
        self,
        target: Any,
        draft: Any = None,
        *,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        drafter: str | Drafter = DecoderConfig.drafter,
        num_draft_tokens: int | str = DecoderConfig.num_draft_tokens,
        acceptance: str | Rule = DecoderConfig.acceptance,
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
            acceptance=name_of(acceptance),
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
            load_options={} if load_options is None else load_options,
        )
        rule = acceptance if isinstance(acceptance, Rule) else None
        check_names(config, drafter, rule)
        models = ModelPair.load(target, draft, config, tokenizer, draft_tokenizer)
        if self._reads_model_settings:
            warn_without_ends(models.target)
        self._open(models, config, drafter, rule)
        is_unused = isinstance(drafter, str) and not self.traits.needs_draft_model
        if draft is not None and self.draft is not None and is_unused:
            log.warning("the draft model is loaded but not used: drafter=%r needs none", self._drafter_name)

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
            "arguments (the models' names and decoder.config) and make another decoder, or decoder.using() for "
            "another one over the same models"
        )

    @overload
    def generate(
        self,
        prompt: str | list[int] | list[Message],
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: list[Any],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        chat: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        chat: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Any: ...  # an array's shape decides

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        chat: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Result | list[Result]:
        """Generate for one prompt (a `Result`) or a list of prompts (a list, in order).

        A prompt is a text, token ids or a list of chat messages. A text goes through the chat template if the tokenizer
        has one, unless chat=False. Ids are a list, an array or tensor (2-D with several rows: several prompts), or what
        a tokenizer returns. An empty list of prompts gives an empty list.
        params: one `SamplingParams` for all prompts, or one per prompt. Its fields may be given as keywords instead:
        `generate(prompt, temperature=0.7, max_tokens=50)`. With n > 1 the other texts are in `Result.alternatives`.

        Further keywords go to the chat template: `tools`, JSON schemas of functions that the model may call, as
        OpenAI's interface has them (`Result.tool_calls` then holds the calls of the answer); `chat_template_kwargs`,
        variables that the template reads, such as {"enable_thinking": False}; and `continue_final_message=True`, with
        which the answer continues the last message.

        Raises `UsageError` for what is not allowed. A row that fails (its own logits processor raises, or your drafter
        does, or no token is left to choose) ends alone: in a list its result has finish reason "error" and says why, a
        single prompt raises.
        """
        prompts, form = read_prompts(prompt), read_form(options)
        results = self._generated(prompts, params_from(params, options), chat, form)
        return results[0] if prompts.single else results

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Result:
        """Answer a conversation: dictionaries with role and content, the last one usually the user's.

        A content is a text, or a list of text parts. params, options: as in `generate`, which gives the same text for
        the same messages, and takes several conversations.

        Raises `UsageError` for invalid messages, for a model without a chat template, and for tools or variables that
        the template does not read.
        """
        conversation, form = read_conversation(messages), read_form(options)
        (result,) = self._generated(conversation, params_from(params, options), True, form)
        return result

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Generate for one prompt, a `Chunk` per round: `for chunk in decoder.stream(prompt): print(chunk, end="")`.

        When the loop has ended, the stream's `result` is what `generate` returns. Stopping the iteration early is
        allowed. Prompt and options are read with the first chunk.
        """
        form = read_form(options)
        return Stream(self._chunks(prompt, params_from(params, options), chat, form))

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """`stream` for coroutines: `async for chunk in decoder.astream(prompt): ...`.

        Rounds are computed in a thread of the decoder, so the event loop goes on; several streams at a time take turns,
        round by round. For many requests at a time, a list of prompts in `asyncio.to_thread(decoder.generate, prompts)`
        is faster, because they share forwards.
        """
        form = read_form(options)
        stream = Stream(self._chunks(prompt, params_from(params, options), chat, form))
        return AsyncStream(stream, self._parts.async_rounds)

    def _generated(self, prompts: Prompts, params: Any, chat: bool, form: ChatForm) -> list[Result]:
        with self._use:
            groups = self.sample_rows(prompts.items, params, chat=chat, form=form)
            texts = iter(self.decode_rows([row for group in groups for row in group]))
            if prompts.single and groups[0][0].error is not None:
                raise groups[0][0].error
            results = [replace(next(texts), alternatives=[next(texts) for _ in group[1:]]) for group in groups]
            return [with_parts(result, self.tokenizer, form.tools) for result in results]

    def _chunks(self, prompt: Prompt, params: Any, chat: bool, form: ChatForm) -> Generator[Chunk, None, Result]:
        prompts = read_prompts(prompt)
        if not prompts.single:
            what = "a list of prompts" if prompts.items else "an empty list"
            raise UsageError(f"prompt is {what}; allowed: stream takes one prompt, generate takes a list")
        row = self.rows(prompts.items, params, chat=chat, form=form)[0]
        yield from self._in_turns(chunks_of(row, self.run([row]), self.tokenizer))
        with self._use:
            return with_parts(self.result(row), self.tokenizer, form.tools)

    def batch(self, source: Any, output: Any, params: SamplingParams | None = None, **options: Any) -> JobReport:
        """Answer a file of requests, or a list of dictionaries, into a file; called again, it continues.

        params: defaults for options that lines do not set; its fields may be given as keywords, as in `generate`.
        Other options: `errors`, and the fields of `JobOptions`. See docs/batch.md.
        """
        from slipstream.jobs.batch_job import run_batch

        self.renew()
        return run_batch(self, source, output, params, options)

    def rounds(self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True) -> Iterator[Round]:
        """Generate for a list of prompts, a `Round` at a time; `Round.row` is the index of the prompt."""
        yield from self.run(self.rows(read_prompts(prompts).items, params, chat=chat))

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
            rule = self.rule if acceptance is None else acceptance if isinstance(acceptance, Rule) else None
            return self._over(models, config, drafter, rule)

    def with_draft(self, draft: Any, draft_tokenizer: Any = None) -> SpeculativeDecoder:
        """A decoder with the same target and KV cache, and another draft model or none (None).

        Its drafter and draft length are "auto".
        """
        with self._use:
            models = self._models.with_draft(draft, self.config, draft_tokenizer)
            return self._over(models, replace(self.config, drafter="auto", num_draft_tokens="auto"), "auto", self.rule)

    def close(self) -> None:
        """Release what this decoder holds; a closed decoder refuses every call.

        Decoders made from it by `using` and `with_draft` stay open: models and memory are freed with the last of them.
        A running stream ends with an error at its next round. Closing twice is allowed.
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

    def encode(self, prompt: Prompt, *, chat: bool = False, **options: Unpack[FormOptions]) -> list[int]:
        """The token ids of a text or of chat messages, which `decode` turns back into text.

        chat=True: a text is rendered as a user's message by the chat template, as in `generate`. options: those that
        `generate` passes to the template.
        """
        form = read_form(options)
        check_known("unknown option", options, list(FormOptions.__annotations__))
        with self._use:  # tokenizers cannot encode in two threads at once
            return self.reader.with_form(form).encode(prompt, chat=chat)

    def decode(self, token_ids: Ids) -> str:
        """The text of token ids, without special tokens."""
        with self._use:
            if self.tokenizer is None:
                raise UsageError(
                    f"model {self.target.name!r} has no tokenizer; "
                    "allowed: with tokenizer=AutoTokenizer.from_pretrained(...)"
                )
            return self.tokenizer.decode(read_ids(token_ids, self.target.backend.vocab_size))

    @property
    def costs(self) -> CostModel:
        """Seconds of the target's forwards and of the draft model's steps, as `auto` knows them before it drafts.

        They are measured once per machine and model. UsageError if this decoder does without that measurement.
        """
        with self._use:
            models, rows = self._models, self.config.max_batch_size
            if models.calibration is None:
                raise UsageError(
                    f"reproducible={self.config.reproducible!r} for {self.target.name!r}: how long its forwards take "
                    "was not measured; allowed: 'auto' or True, and a model that does not run on a cache of its own"
                )
            times, scorer, session = models.draft_times, models.draft_scorer(), models.draft_session
            if not self.traits.needs_forwards:
                times = DraftTimes({1: 0.0})
            elif not times.steps and scorer and session and session.backend.max_length >= 2 * TEXT:
                session.reserve(rows, 2 * TEXT)
                times = time_drafts(scorer, rows)
                session.forget()
            return CostModel.calibrated(models.target_session, models.calibration, times, rows)

    def forget(self) -> None:
        """Empty the KV caches, so that the next prompt is computed from its first token, with the present weights."""
        with self._use:
            self._models.forget()
            self._models.compare_copies()

    def forget_learned(self) -> None:
        """Drop what the drafter learned from earlier requests, as measurements do before each."""
        with self._use:
            for source in self._engine.sources:
                if isinstance(source.drafter, Learner):
                    source.drafter.forget()

    def renew(self) -> None:
        """Adopt what the models' owners have changed; every call that reads prompts begins with this."""
        with self._use:
            models = self._models.current(self.config)
            if models is not self._models:
                self._open(models, self.config, self._parts.drafter, self.rule)

    def scheduler(self) -> Scheduler:
        """A scheduler over this decoder's models: rows are added and cancelled while others are decoded.

        Several threads may use it and the decoder: each call of a scheduler has the models to itself.
        """
        return Scheduler(self._engine, self.config.max_batch_size, lock=lambda: self._use, turn=self._turn)

    def rows(
        self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True, form: ChatForm = PLAIN_CHAT
    ) -> list[Row]:
        """The rows that `generate` would decode for these prompts, for `run`, `decode_rows` or a `scheduler`."""
        with self._use:
            self.renew()
            return self.reader.with_form(form).rows(list(prompts), params, chat=chat)

    def sample_rows(
        self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True, form: ChatForm = PLAIN_CHAT
    ) -> list[list[Row]]:
        """`rows` with `n` rows for each prompt, each with a seed of its own."""
        with self._use:
            self.renew()
            return self.reader.with_form(form).sample_rows(list(prompts), params, chat=chat)

    def run(self, rows: Sequence[Row]) -> Generator[Round]:
        """Decode rows, yielding the facts of every round; `result` makes a finished row a `Result`.

        Raises `UsageError` if weights change before the rows have ended: no single model would have written them.
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
            row = self.rows([token_ids], SamplingParams(max_tokens=1).explicit)[0]  # first: the models may be renewed
            with self._turn():
                return self._models.next_logits(row)

    def score_prompt(self, scores: PromptScores | None, row: Row, count: int, budget: int) -> PromptScores:
        """Log-probabilities of a row's own tokens, about `budget` more of them in each call.

        scores: the previous call's result, None at first. count: number of likeliest tokens to report for each. Uses
        the cache slot after those of a full batch.
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
        requested, sources = self._parts.drafter, self.sources
        if not isinstance(requested, str):
            return requested
        return sources[-1].drafter if sources else None

    @property
    def sources(self) -> list[Source]:
        """The sources of drafts, in the order in which they are asked, without the one that only reads predictions."""
        return [source for source in self._engine.sources if not source.of_predictions]

    @property
    def drafter_name(self) -> str:
        """The name of the drafter in use, with "auto" resolved; a closed decoder still has it."""
        return self._drafter_name

    @property
    def lossless(self) -> bool:
        """True if the output keeps the target's distribution exactly."""
        automatic = self.rule is None and self.config.acceptance == "auto"
        return automatic or (self.rule or load_rule(self.config.acceptance)).lossless

    @property
    def reproducible(self) -> bool:
        """True if forwards keep to shapes that agree to the bit."""
        return bool(self.shapes.widths)

    @property
    def reader(self) -> RequestReader:
        """Turns prompts into rows."""
        return self._parts.reader

    @property
    def traits(self) -> Traits:
        """The declared traits of the drafter in use."""
        return self._parts.choice.traits

    @property
    def coupled(self) -> bool:
        """True if every token is the target's own draw, so that a seed has one text whatever is drafted."""
        return self._parts.choice.coupled

    @property
    def shapes(self) -> Shapes:
        """The forward shapes that the target keeps to."""
        return self._target_session.shapes

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the target's forward shapes, if there is one."""
        return self._models.calibration

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens the target has read so far, all requests together, without those reused from the cache."""
        return self._target_session.prefill_tokens

    def tokens_in_memory(self) -> tuple[int, int]:
        """Numbers of tokens that the KV caches hold in all their slots: the target's and the draft model's."""
        return self._models.tokens_in_memory()

    def num_cached_tokens(self, row: Row) -> int:
        """Number of tokens of a row that begins now that are in the target's KV cache already."""
        with self._use:
            return self._target_session.num_cached(row)

    @classmethod
    def _over(cls, models: ModelPair, config: DecoderConfig, drafter: str | Drafter, rule: Rule | None) -> Self:
        """A decoder over models that are loaded."""
        decoder = cls.__new__(cls)
        decoder._open(models, config, drafter, rule)
        return decoder

    def _open(self, models: ModelPair, config: DecoderConfig, drafter: str | Drafter, rule: Rule | None) -> None:
        use = models.exclusive_use()
        with use:
            choice = choose_engine(models, config, drafter, rule)
            settings = models.settings if self._reads_model_settings else ModelSettings()
            reader = RequestReader(models.target, choice.no_predictions, own_options=settings.applied_to)
            parts = _OpenParts(models, use, drafter, choice, choice.engine(), reader)
        self.config = config
        self.rule = rule
        self._drafter_name = choice.name
        self._parts_if_open = parts

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
        return self._parts.engine

    @property
    def _use(self) -> ExclusiveUse:
        return self._parts.use

    def _turn(self) -> AbstractContextManager[None]:
        """A step of this decoder, with its own attended lengths: another one may have set others since the last."""
        parts = self._parts
        return parts.use.step_of(parts.turn, parts.models.set_attended_lengths)

    def _in_turns(self, items: Iterator[T]) -> Iterator[T]:
        """The items; the models are in exclusive use while one is computed, and free while the caller has it."""
        while True:
            with self._use:
                item = next(items, None)
            if item is None:
                return
            yield item


explained_fields(SpeculativeDecoder, DecoderConfig)
