"""Whoever holds loaded models takes turns at them with others, and can be closed: it then gives them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NoReturn, Self, TypeVar

from slipstream.config import DecoderConfig
from slipstream.core.kv_slots import Shapes
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.models.exclusive_use import ClosedUse, ExclusiveUse, closed_error
from slipstream.models.loaded import Loaded
from slipstream.reproducibility.calibration import Calibration
from slipstream.text.requests import Prompt, RequestReader
from slipstream.text.tokenizer import Tokenizer
from slipstream.text.vocabulary_bridge import VocabularyBridge
from slipstream.wiring.model_pair import ModelPair
from slipstream.wiring.prompt_scores import PromptScores

T = TypeVar("T")


class ModelHolder:
    """The base class of a decoder: its models and their memory.

    calibration: what was measured of the target's forward shapes. reader: turns requests into rows.
    KEPT: attributes that are left after closing.
    """

    KEPT: ClassVar[tuple[str, ...]]
    config: DecoderConfig
    target: Loaded
    draft: Loaded | None
    calibration: Calibration | None
    reader: RequestReader
    _models: ModelPair
    _use: ExclusiveUse
    _user: object  # marks whose turn it is

    def _take(self, models: ModelPair) -> None:
        self._models, self._use = models, models.exclusive_use()
        self.target, self.draft, self.calibration = models.target, models.draft, models.calibration
        self._target_session, self._draft_session = models.target_session, models.draft_session

    def _clone(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a SpeculativeDecoder holds loaded models and cannot be pickled or deep-copied; allowed: to pickle its "
            "arguments (the models' names and decoder.config) and make the decoder anew, or decoder.using() for "
            "another one over the same models"
        )

    @property
    def reproducible(self) -> bool:
        """Whether forwards keep to shapes that agree to the bit."""
        return bool(self.shapes.widths)

    @property
    def shapes(self) -> Shapes:
        """The forward shapes that the target keeps to."""
        return self._target_session.shapes

    @property
    def bridge(self) -> VocabularyBridge | None:
        """What lies between the target's vocabulary and the draft model's, where these differ."""
        return None if self._models.bridged is None else self._models.bridged.bridge

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, if there is one."""
        return self.target.tokenizer

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens the target has read so far, all requests together; reused memory is not read again."""
        return self._target_session.prefill_tokens

    def tokens_in_memory(self) -> tuple[int, int]:
        """How many tokens the memories hold in all their slots: the target's and the draft model's."""
        return self._models.tokens_in_memory()

    def num_cached_tokens(self, row: Row) -> int:
        """How many tokens of a row that begins now the target's KV cache has already."""
        with self._use:
            table = self._target_session.table
            return max((table.usable(slot, row) for slot in range(len(table.states))), default=0)

    def score_prompt(self, scores: PromptScores | None, row: Row, count: int, budget: int) -> PromptScores:
        """Score about `budget` more tokens of a row's text; `scores` is what the call before returned, at first None.

        count: how many of the likeliest tokens to report besides each. The slot behind those of a full batch is used.
        """
        with self._turn():
            found = scores or PromptScores(self._target_session, self.config.max_batch_size, row, count)
            found.advance(budget)
            return found

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """The token ids a prompt stands for."""
        with self._use:  # tokenizers cannot encode in two threads at once
            return self.reader.encode(prompt, chat=chat)

    def forget(self) -> None:
        """Empty the memory, so that the next prompt is computed from its first token."""
        with self._use:
            self._models.forget()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclusive use of the models, with the attended lengths of this decoder."""
        with self._use:
            if self._use.changes_to(self._user):  # another decoder may have set its own since
                self._models.set_attended_lengths()
            yield

    def _in_turns(self, facts: Iterator[T]) -> Iterator[T]:
        """The same facts; the models are in exclusive use while one is awaited and free while the caller has it."""
        while True:
            with self._use:
                fact = next(facts, None)
            if fact is None:
                return
            yield fact

    def close(self) -> None:
        """Give back what this decoder holds; a decoder that is closed refuses every call.

        Decoders made from it by `using` and `with_draft` stay open: models and memory are freed with the last of them.
        A stream under way ends with an error at its next round. Closing twice is allowed.
        """
        if not self._closed:
            with self._use:  # waits for another thread's round
                kept = {name: vars(self)[name] for name in self.KEPT}
                vars(self).clear()
                vars(self).update(kept, _use=ClosedUse())

    @property
    def _closed(self) -> bool:
        return isinstance(vars(self).get("_use"), ClosedUse)

    def __enter__(self) -> Self:
        with self._use:  # refused once closed
            return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Asked for attributes that are missing only: those that `close` has dropped, and misspelt ones."""
            if self._closed:
                raise closed_error()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
