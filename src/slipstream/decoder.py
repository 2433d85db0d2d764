"""`SpeculativeDecoder`: loads models, turns prompts into rows and rounds into results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor

from slipstream import drafters
from slipstream.config import DecoderConfig
from slipstream.core.acceptance import Rule, load_rule, rule_for
from slipstream.core.cache_state import Shapes
from slipstream.core.interfaces import Drafter, Learner, set_attended_lengths
from slipstream.core.loop import Engine
from slipstream.core.ragged_layout import make_session
from slipstream.core.scheduler import Scheduler
from slipstream.core.stats import Stats
from slipstream.core.types import Draft, Round, Row
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.controller import LONGEST, DraftController
from slipstream.draft_length.cost_model import CostModel
from slipstream.draft_length.policies import check_confidence, make_policy
from slipstream.errors import UsageError
from slipstream.models.draft_model import load_draft, load_options_of
from slipstream.models.exclusive_use import ClosedUse, ExclusiveUse, closed_error
from slipstream.models.loaded import Loaded, refuse_unused
from slipstream.models.loading import load
from slipstream.reproducibility.calibration_cache import choose_shapes
from slipstream.sampling.logits_processors import params_of
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler
from slipstream.text.detokenizer import Tokenizer, VisibleText, visible_text
from slipstream.text.prompt_forms import read_prompts
from slipstream.text.requests import Message, Prompt, RequestReader
from slipstream.text.results import Chunk, Result

log = logging.getLogger("slipstream")
T = TypeVar("T")


class SpeculativeDecoder:
    """Generates exactly what `target` would, faster.

    target, draft: a hub id, a local folder, a .gguf file, "smollm2" (the embedded default), "toy", or a loaded
    `PreTrainedModel`.
    tokenizer: needed only with loaded models and text prompts.
    The other arguments are the fields of `DecoderConfig`, where their meaning and defaults are written down.

    Several threads may use one decoder, or several over the same models: they take turns, `generate` for a whole call
    and streams round by round. A decoder belongs to the process that made it.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        *,
        tokenizer: Any = None,
        drafter: str | Drafter = DecoderConfig.drafter,
        num_draft_tokens: int | str = DecoderConfig.num_draft_tokens,
        acceptance: str = DecoderConfig.acceptance,
        dtype: str = DecoderConfig.dtype,
        draft_dtype: str = DecoderConfig.draft_dtype,
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
            device=device,
            fast=fast,
            reproducible=reproducible,
            max_batch_size=max_batch_size,
            load_options=load_options or {},
        )
        if (useless := self.config.contradiction()) is not None:
            log.warning(useless)
        if acceptance != "auto":
            load_rule(acceptance)
        self._drafter: str | Drafter = drafter
        self.rule: Rule | None = None  # an acceptance rule given as an object
        if isinstance(drafter, str):
            drafters.check_name(drafter)
        refuse_unused(load_options_of(self.config), (target, draft))
        given = [model for model in (target, draft) if isinstance(model, torch.nn.Module)]
        with ExclusiveUse(given):  # they may be packed and calibrated now
            self.target: Loaded = load(target, load_options_of(self.config), tokenizer)
            self.draft = load_draft(draft, self.config, self.target, tokenizer)
            self._use = self._exclusive_use()
            self._target_session = make_session(self.target.backend, self._shapes())
            self._draft_session = None if self.draft is None else make_session(self.draft.backend)
            self._reader = RequestReader(self.target)
            self._engine = self._make_engine()
        if draft is not None and isinstance(drafter, str) and not drafters.traits(self._name).needs_draft_model:
            log.warning("the draft model is loaded but not used: drafter=%r needs none", self._name)

    def _exclusive_use(self) -> ExclusiveUse:
        models = [self.target] if self.draft is None else [self.target, self.draft]
        return ExclusiveUse([model.backend if model.model is None else model.model for model in models])

    def _shapes(self) -> Shapes:
        shapes, self.calibration = choose_shapes(self.target, self.config.reproducible, self.config.max_batch_size)
        return shapes

    @property
    def reproducible(self) -> bool:
        """Whether forwards keep to shapes that agree to the bit."""
        return bool(self._target_session.shapes.widths)

    @property
    def drafter_name(self) -> str:
        """The drafter in use, with "auto" resolved."""
        return self._name

    @property
    def drafter(self) -> Drafter:
        """The drafter in use."""
        return self._engine.drafter

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, if there is one."""
        return self.target.tokenizer

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's distribution exactly."""
        if self.rule is not None:
            return self.rule.lossless
        return self.config.acceptance == "auto" or load_rule(self.config.acceptance).lossless

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
                other._target_session = self._target_session.with_shapes(other._shapes())
            other._drafter = self._drafter if drafter is None else drafter
            other.rule = acceptance if isinstance(acceptance, Rule) else None if acceptance else self.rule
            other._engine = other._make_engine()
            return other

    def with_draft(self, draft: Any) -> SpeculativeDecoder:
        """The same target and memory with another draft model, or none (None); drafter and length become "auto"."""
        with self._use:
            other = self._clone()
            other.draft = load_draft(draft, self.config, self.target)
            other._use = other._exclusive_use()
            other._draft_session = None if other.draft is None else make_session(other.draft.backend)
        return other.using("auto", num_draft_tokens="auto")

    def _clone(self) -> SpeculativeDecoder:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def close(self) -> None:
        """Give back what this decoder holds; a decoder that is closed refuses every call.

        Decoders made from it by `using` and `with_draft` stay open: models and memory are freed with the last of them.
        A stream under way ends with an error at its next round. Closing twice is allowed.
        """
        if not isinstance(self._use, ClosedUse):
            with self._use:  # waits for another thread's round
                kept = {"config": self.config, "_name": self._name, "rule": self.rule, "_use": ClosedUse()}
                vars(self).clear()
                vars(self).update(kept)

    def __enter__(self) -> SpeculativeDecoder:
        with self._use:  # refused once closed
            return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Asked for attributes that are missing only: those that `close` has dropped, and misspelt ones."""
            if isinstance(vars(self).get("_use"), ClosedUse):
                raise closed_error()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        if isinstance(self._use, ClosedUse):
            return f"{type(self).__name__}(closed)"
        draft = None if self.draft is None else self.draft.name
        length, rule = self.config.num_draft_tokens, self.rule.name if self.rule else self.config.acceptance
        return (
            f"{type(self).__name__}({self.target.name!r}, {draft!r}, drafter={self.drafter_name!r}, "
            f"num_draft_tokens={length!r}, acceptance={rule!r}, reproducible={self.reproducible}, "
            f"device={str(self.target.backend.device)!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a SpeculativeDecoder holds loaded models and cannot be pickled or deep-copied; allowed: to pickle its "
            "arguments (the models' names and decoder.config) and make the decoder anew, or decoder.using() for "
            "another one over the same models"
        )

    def _make_engine(self) -> Engine:
        """The loop of these settings, with "auto" resolved."""
        self._settings = object()  # marks whose turn it is, see `_steps`
        config, target = self.config, self._target_session
        choice = LengthChoice.parse(config.num_draft_tokens)
        wanted = self._drafter
        if wanted == "auto":
            costs = choice.kind == "auto"
            wanted = drafters.preferred(draft_model=self._draft_session is not None, costs=costs)
        self._name, self.traits = name_of(wanted), drafters.traits_of(wanted)
        check_confidence(choice, config.num_draft_tokens, self._name, self.traits)
        acceptance, device = self.rule or config.acceptance, target.backend.device
        coupled = acceptance != "auto" and rule_for(acceptance, Draft.empty(0, device)).coupled
        controller = self._controller() if choice.kind == "auto" and self._name != "none" else None
        setup = drafters.Setup(
            device,
            target.backend.vocab_size,
            self._draft_session,
            coupled,
            controller,
            choice.confidence,
            acceptance_probs=controller is not None,
            target=target,
        )
        drafter = drafters.load(wanted, setup) if isinstance(wanted, str) else wanted
        if not isinstance(drafter, Drafter):
            raise UsageError(f"drafter={wanted!r}; allowed: a name or an object with propose(rows, lengths, sampler)")
        policy = make_policy(choice, self.traits, controller, coupled=coupled, limit=target.longest_draft)
        return Engine(target, drafter, policy, Sampler, acceptance, self._draft_session)

    def _controller(self) -> DraftController:
        """What decides how much to draft, with the costs that calibration has measured."""
        target, found = self._target_session, self.calibration
        cost_model = CostModel(
            target.shapes.pad,
            target.num_tokens,
            {} if found is None else found.milliseconds,
            {} if found is None else found.totals,
            self.config.max_batch_size,
            timed=target.backend.device.type == "cpu",
        )
        longest = LONGEST if target.longest_draft is None else min(LONGEST, target.longest_draft)
        return DraftController(cost_model, longest=longest, reads=self.traits.reads_prompt)

    def scheduler(self) -> Scheduler:
        """A scheduler over this decoder's models: rows are added and cancelled while others are decoded.

        Its steps take no lock, unlike `generate`, `stream` and `run`: only one thread may use the models meanwhile.
        """
        return Scheduler(self._engine, self.config.max_batch_size)

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
            groups = self._reader.sample_rows(prompts.items, params, chat=chat)
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
        yield from self._steps(self._chunks(self.rows(prompts.items, params, chat=chat)[0]))

    def _chunks(self, row: Row) -> Iterator[Chunk]:
        text = None if self.tokenizer is None else VisibleText(self.tokenizer, params_of(row))
        for done in self.scheduler().run([row]):
            piece = ""
            if text is not None:
                piece = "".join(map(text.push, done.tokens))
                piece += text.flush() if done.finish_reason is not None else ""
            yield Chunk(piece, done.tokens, done.origins, done)
        if row.error is not None:
            raise row.error

    def rounds(self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True) -> Iterator[Round]:
        """The facts as they come, over a list of prompts; `Round.row` is the index of the prompt."""
        yield from self.run(self.rows(prompts, params, chat=chat))

    def forget(self) -> None:
        """Empty the memory, so that the next prompt is computed from its first token."""
        with self._use:
            for session in (self._target_session, self._draft_session):
                if session is not None:
                    session.forget()

    def forget_learned(self) -> None:
        """Drop what the drafter learned from earlier requests, as measurements do before each."""
        with self._use:
            if isinstance(self._engine.drafter, Learner):
                self._engine.drafter.forget()

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens the target has read so far, all requests together; reused memory is not read again."""
        return self._target_session.prefill_tokens

    def tokens_in_memory(self) -> tuple[int, int]:
        """How many tokens the memories hold in all their slots: the target's and the draft model's."""
        sessions = (self._target_session, self._draft_session)
        target, draft = (sum(m.valid(m.row) for m in s.slot_states if m.row is not None) if s else 0 for s in sessions)
        return target, draft

    def next_logits(self, token_ids: list[int]) -> Tensor:
        """[V] logits of the target after these tokens, in the precision it works in."""
        row = self.rows([token_ids], SamplingParams(max_tokens=1))[0]
        with self._use, torch.inference_mode():
            self._target_session.reserve(1, len(token_ids) + 1)
            nothing = torch.empty(1, 0, dtype=torch.int64, device=self.target.backend.device)
            return self._target_session.score([row], nothing, [0])[0, 0]

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """The token ids a prompt stands for."""
        with self._use:  # tokenizers cannot encode in two threads at once
            return self._reader.encode(prompt, chat=chat)

    def rows(self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True) -> list[Row]:
        """The rows `generate` would decode for these prompts; for callers that run them with `run`."""
        with self._use:
            return self._reader.rows(list(prompts), params, chat=chat)

    def run(self, rows: Sequence[Row]) -> Iterator[Round]:
        """Decode rows, yielding the facts of every round; `result` makes a finished row a `Result`."""
        yield from self._steps(self.scheduler().run(rows))

    def decode(self, rows: Sequence[Row]) -> list[Result]:
        """Decode rows to their ends; other threads wait until all are finished."""
        with self._use:
            for _ in self.scheduler().run(rows):
                pass
            return [self.result(row) for row in rows]

    def _steps(self, facts: Iterator[T]) -> Iterator[T]:
        """The same facts; the models are in exclusive use while one is awaited and free while the caller has it."""
        while True:
            with self._use:
                if self._use.changes_to(self._settings):  # another decoder may have set its own attended lengths since
                    shapes = self._target_session.shapes
                    set_attended_lengths(self.target.backend, shapes.attended_unit, shapes.attended_lengths)
                fact = next(facts, None)
            if fact is None:
                return
            yield fact

    def result(self, row: Row) -> Result:
        """What a finished row became."""
        assert row.finish_reason is not None
        text = "" if self.tokenizer is None else visible_text(self.tokenizer, params_of(row), row.output)
        return Result(
            text=text,
            token_ids=row.output,
            finish_reason=row.finish_reason,
            stats=Stats.of(row.rounds, lossless=self.lossless),
            rounds=row.rounds,
            seed=row.seed,
            prompt_token_ids=row.tokens[: row.prompt_length],
            error=None if row.error is None else str(row.error),
            tokenizer=self.tokenizer,
        )


def name_of(choice: object) -> str:
    """The name of a drafter or rule, whichever way it was given."""
    if isinstance(choice, Rule):
        return choice.name
    return choice if isinstance(choice, str) else type(choice).__name__
